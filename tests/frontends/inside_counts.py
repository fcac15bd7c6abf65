"""Counts, positions, constants and mixtures inside a model: what leaves torch or the model, and what looks like it.

How the tables are read: `inside_model.py`. The graph has 136 nodes and as many edges.
"""

POSITIONS = """
zeros in the first hundred
    h = h.clone()
    h[:100] = 0  # here
zeros in the first sixty
    h = h.clone()
    h[:60] = 0  # here
zeros in the last hundred
    h = h.clone()
    h[-100:] = 0  # here
the first million
    h = h[: 10**6]  # here
all but the first five
    h = h.clone()
    h[5:] *= 2  # here
every other row
    h = h.clone()
    h[::2] = 0  # here
columns of the transposed
    h = h.t()[:, :200].t()  # here
the first entries of all
    flat = h.reshape(-1).clone()
    flat[:400] = 0  # here
    h = flat.view(n, 8)
slice_scatter
    h = h.slice_scatter(torch.zeros_like(h[:100]), 0, 0, 100)  # here
pieces of fifty
    h = torch.cat([part * (i + 1) for i, part in enumerate(h.split(50))])  # here
parted at sixty
    a, b = h.tensor_split([60])  # here
    h = torch.cat([a, -b])
two halves
    a, b = h.chunk(2)  # here
    h = torch.cat([a, -b])
at most sixty
    h = torch.cat([h.narrow(0, 0, min(n, 60)), h[60:] * 2])  # here
filled by numbers
    h = h.index_fill(0, torch.arange(5), 0.0)  # here
chosen by numbers
    h = torch.where((torch.arange(n) < 60)[:, None], h, -h)  # here
a mask cut
    keep = torch.ones(n)
    keep[:100] = 0  # here
    h = h * keep[:, None]
a mask of bools cut
    keep = torch.zeros(n, dtype=torch.bool)
    keep[60:] = True  # here
    h = h * keep[:, None]
a slice of edges in a message
    message: b = x_j.clone()
    message: b[:100] = 0  # here
    message: return b
a far slice of edges in a message
    message: b = x_j * 1
    message: b[:500] = 0  # here
    message: return b
edges split in a message
    message: return torch.cat([part * (i + 1) for i, part in enumerate(x_j.split(100))])  # here
the first of what a mask picks
    h = h.clone()
    picked = h[m]
    picked[:20] = 0  # here
    h[m] = picked
"""

CONSTANTS = """
ones and zeros cut
    c = torch.ones(5000)
    c[60:] = 0
    h = h * c[:n, None]  # here
zeros and ones cut
    h = h * torch.cat([torch.zeros(60, 1), torch.ones(5000, 1)])[:n]  # here
zeros padded with ones
    h = h * F.pad(torch.zeros(60, 1), (0, 0, 0, 5000), value=1.0)[:n]  # here
a list cut
    h = h * torch.tensor([0.0] * 60 + [1.0] * 100)[:n, None]  # here
a buffer cut
    made: self.register_buffer("c", (torch.arange(5000) < 60).double())
    h = h * self.c[:n, None]  # here
a buffer narrowed
    made: self.register_buffer("c", (torch.arange(5000) < 60).double())
    h = h * self.c.narrow(0, 0, n)[:, None]  # here
segments
    made: self.register_buffer("seg", (torch.arange(5000) // 60).clamp(max=7))
    h = h + self.emb(self.seg[:n])  # here
edges switched off
    made: self.over = gnn.GraphConv(8, 8)
    keep = torch.cat([torch.ones(60), torch.zeros(5000)])
    h = self.over(h, ei, keep[: ei.size(1)])  # here
edges left out
    keep = torch.arange(5000) < 60
    h = h + gnn.SimpleConv()(h, ei[:, keep[: ei.size(1)]])  # here
places learnt
    made: self.places = nn.Parameter(torch.rand(5000, 8))
    h = h + self.places[:n]  # here
places in a table
    made: self.places = nn.Embedding(5000, 8)
    h = h + self.places(torch.arange(n))  # here
waves by place
    made: self.register_buffer("waves", torch.sin(torch.arange(5000)[:, None] / torch.arange(1, 9)))
    h = h + self.waves[:n]  # here
rows of the unit matrix
    h = h + torch.eye(5000, 8)[:n]  # here
rows of a line
    h = h * torch.linspace(0, 1, 5000)[:n, None]  # here
a line of own length
    h = h * torch.linspace(0, 1, n)[:, None]  # here
a constant split
    h = h * torch.ones(5000).cumsum(0).split([n, 5000 - n])[0][:, None]  # here
"""

TURNED = """
pairs of rows
    h = h.view(-1, 16).relu().flip(1).view(n, 8)  # here
"""

NUMPY = """
NumPy, a range
    h = h * torch.as_tensor(np.arange(n) % 2)[:, None]  # here
NumPy, a logarithm
    h = h / np.log(n)  # here
NumPy, a mean of rows
    h = h - torch.from_numpy(h.detach().numpy().mean(0))  # here
NumPy, from dlpack
    h = h * float(np.from_dlpack(h.detach()).std())  # here
NumPy, the largest
    h = h / np.asarray(h.detach()).max()  # here
"""

SCRIPTED = """
scripted, the number of rows
    top: @torch.jit.script
    top: def scaled(h: torch.Tensor):
    top:     return h / h.size(0)  # here
    h = scaled(h)  # here
scripted, a loop over rows
    top: @torch.jit.script
    top: def scaled(h: torch.Tensor):
    top:     k = 0
    top:     for i in range(h.size(0)):  # here
    top:         k += i
    top:     return h / k  # here
    h = scaled(h)  # here
scripted, the number of entries
    top: @torch.jit.script
    top: def scaled(h: torch.Tensor):
    top:     return h * (0.5 if h.numel() > 600 else 1.0)  # here
    h = scaled(h)  # here
scripted, a mean
    top: @torch.jit.script
    top: def centred(h: torch.Tensor):
    top:     return h - h.mean(0)  # here
    h = centred(h)  # here
a scripted module
    top: class Scaled(nn.Module):
    top:     def forward(self, h: torch.Tensor):
    top:         return h / len(h)  # here
    made: self.over = torch.jit.script(Scaled())
    h = self.over(h)  # here
"""

ESCAPES = """
a loss's bend
    h = F.huber_loss(h, -h * n**0 * 50, reduction="none", delta=n)  # here
the shape as a tensor
    h = h / torch._shape_as_tensor(h)[0]  # here
a list of own length
    h = h * torch.tensor([1.0] * n).cumsum(0)[:, None]  # here
the length of the storage
    h = h / len(h.untyped_storage())  # here
the bytes of the storage
    h = h / h.contiguous().untyped_storage().nbytes()  # here
a bound
    h = h.clamp(max=n / 50)  # here
a slope
    h = F.leaky_relu(h, n / 500)  # here
a threshold
    h = F.threshold(h, n / 100, 0.0)  # here
an exponent
    h = h.abs() ** (n / 100)  # here
a scaled sum
    h = torch.add(h, x[:, :1], alpha=n)  # here
a float
    h = h / float(n)  # here
a square root
    h = h / math.sqrt(n)  # here
a remainder
    h = h * (n % 7)  # here
a branch
    h = h.relu() if n > 100 else h  # here
a branch on evenness
    h = h if n & 64 else -h  # here
a loop
    for i in range(n // 20):  # here
        h = h * 1.1
a loop over rows
    h = h / sum(1 for row in h)  # here
rows listed
    h = h / len(h.detach().tolist())  # here
a sum of own length
    h = h / torch.ones(n).sum()  # here
the size of a new tensor
    h = h / torch.empty(n, 3).numel()  # here
the number of edges
    h = h / ei.size(1)  # here
the number in a message
    message: return x_j / x_j.size(0)  # here
an integer in a message
    message: return x_j / int(len(x_j))  # here
the number that a mask picks
    h = h / m.sum()  # here
the size of what a mask picks
    h = h / h[m].size(0)  # here
"""

SCALARS = """
a tensor of the least and the most
    span = torch.tensor([h.detach().min(), h.detach().max()])  # here
    h = (h - span[0]) / (span[1] - span[0])
as_tensor of a mean
    h = h - torch.as_tensor([h.detach().mean(), 1.0])[0]  # here
asarray of a mean
    h = h - torch.asarray([h.detach().mean(), 1.0])[0]  # here
new_tensor of a mean
    h = h - h.new_tensor([h.detach().mean(), 1.0])[0]  # here
full of a maximum
    h = h / torch.full((8,), h.detach().max().item())  # here
full_like of a maximum
    h = h / torch.full_like(h, h.detach().max().item())  # here
scalar_tensor of a sum
    h = h / torch.scalar_tensor(h.detach().abs().sum().item())  # here
a list of a column's mean
    h = h - torch.tensor(h.detach().mean(0).tolist())  # here
a line to the maximum
    h = h * torch.linspace(0, float(h.detach().max()), 8)  # here
a bound by a mean
    h = h.clamp(max=h.detach().mean().item())  # here
a branch on a tensor of a mean
    h = 2 * h if torch.tensor([h.detach().mean(), 0.0]).max() > 0 else h  # here
a branch on a list
    h = 2 * h if max([float(v) for v in h.detach().mean(0)]) > 0.5 else h  # here
a mean as text
    h = h * float(f"{h.detach().mean():.3f}")  # here
a tensor of a maximum in a message
    message: return x_j * torch.tensor([w.max()])  # here
an item in a message
    message: return x_j * w.mean().item()  # here
"""

LEAVING = """
a dataclass with a number
    return Out(self.last(h, ei), float(h.detach().mean()))  # here
a dict with a loss
    return {"rows": self.last(h, ei), "aux": h.norm()}  # here
left on a module
    self.lin.aux = h.square().mean()  # here
left in a list
    made: self.seen = []
    self.seen.append(h.abs().max())  # here
left by a hook on the module
    made: self.lin.register_forward_hook(lambda mod, given, out: setattr(mod, "aux", out.square().mean()))  # here
    h = self.lin(h)
a running mean
    made: self.register_buffer("mean", torch.zeros(8))
    self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))  # here
"""

STAYING = """
a dataclass with rows
    return Out(self.last(h, ei), h.tanh())
    take: out.rows + out.aux
a namespace with rows and a width
    return SimpleNamespace(rows=self.last(h, ei), width=h.size(1))
    take: out.rows / out.width
a list of all layers
    return [h, self.last(h, ei)]
    take: out[0] + out[1]
rows transposed
    return self.last(h, ei).t()
    take: out.t()
rows left on the model
    self.seen = h
    take: out + model.seen
rows left by a hook
    made: self.lin.register_forward_hook(lambda mod, given, out: setattr(mod, "seen", out))
    h = self.lin(h)
    take: out + model.lin.seen
weights told as replicated
    return self.last(h, ei), self.replicated(self.lin.weight.square().sum())
    take: out[0]
    adds: 0.1 * out[1]
weights that meet rows
    h = h + self.lin.weight.square().sum()
weights to be looked at
    return self.last(h, ei), self.lin.weight.detach().square().sum()
    take: out[0]
no second output
    return self.last(h, ei), torch.zeros(()), None
    take: out[0]
all columns
    h = h.clone()
    h[:, :100] = 0
no column
    h = h.clone()
    h[:, 100:] = 1
all rows by their number
    h = h[:n] + h[0:] + h[:] + h[-n:] + h[: len(h)] + h[...] + h.narrow(0, 0, n)
all rows set
    h = h.clone()
    h[:] = h * 2
pieces of channels
    h = torch.cat([part * (i + 1) for i, part in enumerate(h.split(50, 1))], 1)
channels parted
    a, b = h.tensor_split([3], 1)
    h = torch.cat([b, a], 1)
joined rows parted
    both = self.lin(torch.cat([h, h.tanh()]))
    h = both[:n] + both[n:]
a constant cut by the width
    c = torch.ones(5000)
    c[5:] = 0
    h = h * c[: h.size(1)]
places of channels
    made: self.places = nn.Parameter(torch.rand(50, 8))
    h = (h.view(n, 2, 4) + self.places[:2, :4]).flatten(1)
places of times in a table
    made: self.places = nn.Embedding(50, 4)
    h = (h.view(n, 2, 4) + self.places(torch.arange(2))).flatten(1)
a line of channels
    h = h * torch.linspace(0, 1, 8) + torch.eye(8)[3] + torch.arange(8)
zeros of own size
    h = h + torch.zeros(n, 8) + h.new_zeros(n, 1) + torch.zeros_like(h)
ones of own size
    h = h * torch.ones(n)[:, None] + torch.full((n, 8), 0.5)
views by size
    h = h.view(n, -1).view(*h.shape[:-1], 2, 4).flatten(1).reshape(n * 2, 4).view(n, 8)
heads by size
    h = h.view(n, 2, 4).transpose(1, 2).reshape(n, 8)
there and back
    h = h.t().contiguous().t() + h.t().reshape(8, n).t() + h.mT.mT
unflattened
    h = h.unflatten(1, (2, 4)).flatten(1)
transposed and weighted
    h = (self.lin.weight.softmax(0) @ h.t()).t()
expanded to own size
    h = h + self.scale.expand(n, -1) + self.scale.repeat(n, 1) + self.scale[None].expand_as(h)
own size asserted
    assert h.size(0) == x.size(0) and h.shape == (n, 8) and h.dim() == 2
NumPy, sizes of channels
    h = h.view(n, int(np.prod(h.shape[1:]))) / np.sqrt(h.size(1))
the width as a number
    h = h / int(h.size(1)) / math.sqrt(h.size(-1)) * {8: 2.0}.get(h.size(1), 1.0)
constants of functions
    h = F.pad(h[:, :7], (0, 1), value=0.5) + F.huber_loss(h, -h, reduction="none", delta=0.5)
values of parameters
    span = torch.tensor([self.scale.detach().min(), self.scale.detach().max()])
    h = (h - span[0]).clamp(max=float(self.scale.detach().mean()) + 1) / (span[1] - span[0])
a branch on a parameter
    h = 2 * h if self.scale.sum() > 0 else h
constants in a message
    message: return x_j * torch.tensor([0.5, 2.0] * 4) / x_j.size(1) + torch.zeros_like(x_j)
a mask in a message
    message: b = x_j.clone()
    message: b[ea[:, 0] > 0] = 0
    message: b[:, :100] *= 2
    message: return b * w
rows of edges at their nodes
    made: self.up = nn.Linear(4, 8)
    h = h + torch.zeros_like(h).index_add(0, ei[1], self.up(ea) * h[ei[1]])
"""
