"""Counts, positions and constants inside a model: what a rank's own number of rows decides, and how it leaves torch.

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
the first million | h = h[: 10**6]
all but the first five
    h = h.clone()
    h[5:] *= 2  # here
every other row
    h = h.clone()
    h[::2] = 0  # here
columns of the transposed | h = h.t()[:, :200].t()
the first entries of all
    flat = h.reshape(-1).clone()
    flat[:400] = 0  # here
    h = flat.view(n, 8)
slice_scatter | h = h.slice_scatter(torch.zeros_like(h[:100]), 0, 0, 100)
pieces of fifty | h = torch.cat([part * (i + 1) for i, part in enumerate(h.split(50))])
parted at sixty
    a, b = h.tensor_split([60])  # here
    h = torch.cat([a, -b])
two halves
    a, b = h.chunk(2)  # here
    h = torch.cat([a, -b])
at most sixty | h = torch.cat([h.narrow(0, 0, min(n, 60)), h[60:] * 2])
filled by numbers | h = h.index_fill(0, torch.arange(5), 0.0)
chosen by numbers | h = torch.where((torch.arange(n) < 60)[:, None], h, -h)
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
edges split in a message | message: return torch.cat([part * (i + 1) for i, part in enumerate(x_j.split(100))])
the first of what a mask picks
    h = h.clone()
    picked = h[m]
    picked[:20] = 0  # here
    h[m] = picked
"""

COUNTED = """
a share | h = h * (1.0 / x.size(0))
PageRank | h = 0.85 * h + 0.15 / h.shape[0]
twice the number | h = h * (2.0 * x.size(0))
a logarithm of the number | h = h * math.log(x.size(0) + 1)
a logarithm of NumPy as a float | h = h * float(np.log(x.size(0)))
the mean degree | h = h * (1.0 * ei.size(1) / x.size(0))
the number in a tensor | h = h / torch.tensor([x.size(0)])
the shape in a tensor | h = h / torch.tensor(x.shape)[0]
the entries of the shape | h = h / x.shape.numel()
a line to the number | h = h.clone().index_fill_(1, torch.tensor([0]), 0.0) + torch.linspace(0, x.size(0), 8)
half the number | h = h * (x.size(0) >> 1)
the number rounded | h = h * round(x.size(0))
a number of NumPy | h = h * x.size(0).item() if hasattr(x.size(0), "item") else h / (1 / len(x))
the number in a new tensor | h = h * h.new_tensor(x.size(0))
the number as an array | h = h * torch.asarray(x.size(0))
the number as a slope | h = F.leaky_relu(h, x.size(0))
the number as a factor | h = torch.addcmul(h, h, h, value=x.size(0))
edge_index.max() | h = h / (int(ei.max()) + 1)
the largest id | h = h + ei.max()
the largest source | h = h * (ei[0].max() + 1)
by the length and the shape | h = h / len(h) ** 0 / h.shape[0]
numbers of rows | h = h * torch.arange(n).view(-1, 1)
numbers of edges as weights | gnn.GraphConv(8, 8) | h = self.over(h, ei, torch.arange(ei.size(1)).double())
the first ten thousand apart
    h = h + self.emb((torch.arange(n) >= 10_000).long())  # here
    says: differs from row to row of the nodes|has an entry for each of
blocks of ten thousand
    h = h * (torch.arange(n) // 10_000 + 1).unsqueeze(1)  # here
    says: differs from row to row of the nodes
"""

CONSTANTS = """
a buffer cut at what is counted
    made: self.register_buffer("over", torch.cat([torch.ones(100), torch.zeros(900)]))
    h = h * self.over[: len(h), None]  # here
ones and zeros cut
    c = torch.ones(5000)
    c[60:] = 0
    h = h * c[:n, None]  # here
zeros and ones cut | h = h * torch.cat([torch.zeros(60, 1), torch.ones(5000, 1)])[:n]
zeros padded with ones | h = h * F.pad(torch.zeros(60, 1), (0, 0, 0, 5000), value=1.0)[:n]
a list cut | h = h * torch.tensor([0.0] * 60 + [1.0] * 100)[:n, None]
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
rows of the unit matrix | h = h + torch.eye(5000, 8)[:n]
rows of a line | h = h * torch.linspace(0, 1, 5000)[:n, None]
a line of own length | h = h * torch.linspace(0, 1, n)[:, None]
a constant split | h = h * torch.ones(5000).cumsum(0).split([n, 5000 - n])[0][:, None]
"""

TURNED = """
eight rows turned | h = h.reshape(8, -1).t()
columns of own length turned | h = h.reshape(8, n).t()
transposed, then rows | h = h.t().reshape(n, 8)
transposed, contiguous, then rows | h = h.t().contiguous().view(n, 8)
rows in eight blocks | h = h.unflatten(0, (8, -1)).transpose(0, 1).reshape(n, 8)
pairs of rows | h = h.view(-1, 16).relu().flip(1).view(n, 8)
edge rows beside node rows
    made: self.up = nn.Linear(4, 8)
    h = h + self.up(ea)  # here
a mask of edges on nodes | h = h * (w > 0.5)[:, None]
kinds of edges as labels | h = h + self.emb(kind)
node rows as weights of edges | gnn.GraphConv(8, 8) | h = self.over(h, ei, h[:, 0].sigmoid())
node rows summed over edges | h = h + torch.zeros_like(h).index_add(0, ei[1], h)
"""

NUMPY = """
NumPy, a line | h = h * torch.from_numpy(np.linspace(0, 1, n))[:, None]
NumPy, numbers of rows | h = h * torch.from_numpy(np.cumsum(np.ones(n)))[:, None]
NumPy, a range | h = h * torch.as_tensor(np.arange(n) % 2)[:, None]
NumPy, a window | h = h * torch.tensor(np.hanning(n))[:, None]
NumPy, a product of sizes | h = h / np.prod(h.shape)
NumPy, a logarithm | h = h / np.log(n)
NumPy, a quotient | h = h * float(np.float64(1) / n)
NumPy, an array of sizes | h = h / np.array(h.shape)[0]
NumPy, draws of one seed | h = h * torch.as_tensor(np.random.RandomState(0).rand(n, 1))
NumPy, a sum of ones | h = h / np.ones(n).sum()
NumPy, a mean of rows | h = h - torch.from_numpy(h.detach().numpy().mean(0))
NumPy, from dlpack | h = h * float(np.from_dlpack(h.detach()).std())
NumPy, the largest | h = h / np.asarray(h.detach()).max()
"""

SCRIPTED = """
scripted, in another function
    top: @torch.jit.script
    top: def doubled(h: torch.Tensor):
    top:     return h.relu() * 2
    top: def act(h):
    top:     return doubled(h)  # here
    h = act(h)
    says: in code that torch.jit.script has compiled
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
padded with the number | h = h + F.pad(h[:, :7], (0, 1), value=n)
a loss's bend | h = F.huber_loss(h, -h * n**0 * 50, reduction="none", delta=n)
a smooth loss's bend | h = F.smooth_l1_loss(h, -h, reduction="none", beta=n)
the shape as a tensor | h = h / torch._shape_as_tensor(h)[0]
the number as a float | h = h / torch.sym_float(n)
a table of numbers | h = h * {136: 2.0, 40: 3.0}.get(n, 1.0)
a list of own length | h = h * torch.tensor([1.0] * n).cumsum(0)[:, None]
the length of the storage | h = h / len(h.untyped_storage())
the bytes of the storage | h = h / h.contiguous().untyped_storage().nbytes()
the bytes of a tensor | h = h / h.nbytes
a stride | h = h / h.t().contiguous().stride(0)
a bound | h = h.clamp(max=n / 50)
a slope | h = F.leaky_relu(h, n / 500)
an epsilon | h = F.layer_norm(h, (8,), eps=n)
a threshold | h = F.threshold(h, n / 100, 0.0)
an exponent | h = h.abs() ** (n / 100)
a scaled sum | h = torch.add(h, x[:, :1], alpha=n)
an integer | h = h / int(n)
a float | h = h / float(n)
an index | h = h / operator.index(n)
a fraction | h = h * float(fractions.Fraction(1, n))
pairs | h = h / math.comb(n, 2)
a square root | h = h / math.sqrt(n)
a remainder | h = h * (n % 7)
a branch on evenness | h = h if n & 64 else -h
a loop
    for i in range(n // 20):  # here
        h = h * 1.1
a loop over rows | h = h / sum(1 for row in h)
rows listed | h = h / len(h.detach().tolist())
a sum of own length | h = h / torch.ones(n).sum()
the last of a range | h = h / torch.arange(n)[-1]
the size of a new tensor | h = h / torch.empty(n, 3).numel()
the number of edges | h = h / ei.size(1)
the number in a message | message: return x_j / x_j.size(0)
an integer in a message | message: return x_j / int(len(x_j))
the number that a mask picks | h = h / m.sum()
the size of what a mask picks | h = h / h[m].size(0)
"""
