"""Several graphs at once, each shared by a group of ranks: gradients are averaged over the groups.

    python examples/groups.py
    torchrun --nproc-per-node 4 examples/groups.py

Half of the processes share one graph, and half another one. One process is one group.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, Sequential

import shardpass as sp


def ring(number: int) -> Data:
    """The graph of a group: its labels say on which half of a ring the nodes lie."""
    nodes = 100 + 20 * number
    ids = torch.arange(nodes)
    angle = ids * (2 * torch.pi / nodes)
    x = torch.stack([angle.sin(), angle.cos()], 1)
    return Data(edge_index=torch.stack([ids, (ids + 1) % nodes]), x=x, y=(angle >= torch.pi).long())


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # started by python alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (groups, dist.get_world_size() // groups), mesh_dim_names=("data", "graph"))
    number = mesh.get_local_rank("data")

    comm = sp.connect(mesh["graph"])  # the ranks that share one graph
    graph = sp.shard(ring(number), comm)
    torch.manual_seed(0)
    layers = [(SAGEConv(2, 16), "x, edges -> x"), torch.nn.ReLU(), (SAGEConv(16, 2), "x, edges -> x")]
    wrapped = sp.pyg.wrap(Sequential("x, edges", layers), comm)
    model = DistributedDataParallel(wrapped, process_group=mesh["data"].get_group())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        out = model(graph.x, graph)
        sp.cross_entropy(out, graph.y, None, comm).backward()
        optimizer.step()
    accuracy = sp.accuracy(out, graph.y, None, comm)
    if comm.rank == 0:
        print(f"group {number} of {groups}, {comm.size} rank(s): accuracy {accuracy:.3f}")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
