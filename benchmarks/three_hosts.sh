# Three network namespaces as hosts of one network: unshare -rn bash three_hosts.sh COMMAND...
# The command starts a rank in each. It finds their processes in $NAMESPACES, from rank 0 on.
# With $RATE, such as 100mbit, that is how fast a host sends.
# When the file $FAULT is there, the link of host $LOST is taken down, and the file $GO is made, unless $LOST is empty.
ip link add name middle type bridge
ip link set middle up
for host in 0 1 2; do
    unshare -n sleep 100000 & namespaces[$host]=$!
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
    ip link add name to$host type veth peer name net netns $!
    ip link set to$host master middle up
    in_host="nsenter -t $! -n"
    $in_host ip link set lo up
    $in_host ip link set net up
    $in_host ip addr add 10.9.0.1$host/24 dev net
    if [ "$RATE" ]; then
        $in_host tc qdisc add dev net root tbf rate $RATE burst 64kb latency 400ms
    fi
done
NAMESPACES="${namespaces[*]}" WORLD_SIZE=3 MASTER_ADDR=10.9.0.10 MASTER_PORT=29400 "$@" &
job=$!
if [ "$LOST" ]; then
    until [ -e "$FAULT" ]; do sleep 0.1; done
    ip link set to$LOST down
    touch "$GO"
fi
wait $job
code=$?
kill ${namespaces[@]}
exit $code
