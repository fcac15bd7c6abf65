# Three network namespaces as hosts of one network, a rank in each: unshare -rn bash three_hosts.sh COMMAND...
# When the file $FAULT is there, the link of host $LOST is taken down, and the file $GO is made.
ip link add name middle type bridge
ip link set middle up
for host in 0 1 2; do
    unshare -n sleep 100000 & namespaces[$host]=$!
done
sleep 1
for host in 0 1 2; do
    ip link add name to$host type veth peer name net netns ${namespaces[$host]}
    ip link set to$host master middle up
    in_host="nsenter -t ${namespaces[$host]} -n"
    $in_host ip link set lo up
    $in_host ip link set net up
    $in_host ip addr add 10.9.0.1$host/24 dev net
    WORLD_SIZE=3 RANK=$host MASTER_ADDR=10.9.0.10 MASTER_PORT=29400 GLOO_SOCKET_IFNAME=net $in_host "$@" &
    ranks[$host]=$!
done
until [ -e "$FAULT" ]; do sleep 0.1; done
ip link set to$LOST down
touch "$GO"
for host in 0 1 2; do wait ${ranks[$host]} || code=1; done
kill ${namespaces[@]}
exit ${code:-0}
