"""Values and mixtures inside a model: numbers made of several rows, what leaves the model, and what may do so.

How the tables are read: `inside_model.py`.
"""

SCALARS = """
a tensor of the least and the most
    span = torch.tensor([h.detach().min(), h.detach().max()])  # here
    h = (h - span[0]) / (span[1] - span[0])
as_tensor of a mean | h = h - torch.as_tensor([h.detach().mean(), 1.0])[0]
asarray of a mean | h = h - torch.asarray([h.detach().mean(), 1.0])[0]
new_tensor of a mean | h = h - h.new_tensor([h.detach().mean(), 1.0])[0]
full of a maximum | h = h / torch.full((8,), h.detach().max().item())
full_like of a maximum | h = h / torch.full_like(h, h.detach().max().item())
scalar_tensor of a sum | h = h / torch.scalar_tensor(h.detach().abs().sum().item())
a list of a column's mean | h = h - torch.tensor(h.detach().mean(0).tolist())
a line to the maximum | h = h * torch.linspace(0, float(h.detach().max()), 8)
a bound by a mean | h = h.clamp(max=h.detach().mean().item())
a branch on a tensor of a mean | h = 2 * h if torch.tensor([h.detach().mean(), 0.0]).max() > 0 else h
a branch on a list | h = 2 * h if max([float(v) for v in h.detach().mean(0)]) > 0.5 else h
a mean as text | h = h * float(f"{h.detach().mean():.3f}")
gradients of messages that are centred
    message: m = x_j.tanh()
    message: if m.requires_grad:
    message:     m.register_hook(lambda g: g - g.mean(0))  # here
    message: return m
a tensor of a maximum in a message | message: return x_j * torch.tensor([w.max()])
an item in a message | message: return x_j * w.mean().item()
"""

MIXED = """
centred | h = h - h.mean(0)
hubs added | h = h + h[utils.degree(ei[1], n) > 1].sum(0)
a branch on a sum | h = h if x.sum() > 0 else -h
the top rows | h = h + h[h.sum(1).topk(3).indices].sum(0)
rows of a mask and as many others
    half, other = h[x[:, 0] > 0], h[x[:, 0] <= 0]
    h = h + (half[: min(len(half), len(other))] + other[: min(len(half), len(other))]).sum(0)  # here
right, with a threshold in backward
    scaled = h / h.detach().abs().max()  # here
    h = h + (scaled - scaled.detach())
attention over nodes by a module | nn.MultiheadAttention(8, 2, dropout=0.5) | h = self.over(h, h, h)[0]
attention of heads over nodes
    q = h.view(1, -1, 2, 4).transpose(1, 2)
    h = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 8)  # here
weights by their mean | gnn.GraphConv(8, 8) | h = self.over(h, ei, w / w.mean())
rows pooled | return self.last(h, ei).mean(0)
centred in training | h = h - h.mean(0) if self.training else h
a spread mean | h = h - h.mean(0).expand(h.size(0), 8)
a mean as rows | h = self.last(h.mean(0).expand_as(h), ei)
a repeated mean | h = self.last(h.mean(0).repeat(x.size(0), 1), ei)
a broadcast mean | h = self.last(torch.broadcast_tensors(h.mean(0), h)[0], ei)
a mean of a deep copy | h = h - copy.deepcopy(h.detach()).mean(0)
distances of all pairs | h = h / F.pdist(h).mean()
messages by the length of a column | message: return x_j / x_j.norm(dim=0).clamp(min=12)
a branch on messages | message: return x_j * 2 if (x_j > 1).any() else x_j
messages scaled by all nodes
    top: class ScaledByAll(gnn.MessagePassing):
    top:     def forward(self, x, ei):
    top:         self.scale = x.abs().mean()  # here
    top:         return self.propagate(ei, x=x)
    top:     def message(self, x_j):
    top:         return x_j * self.scale
    made: self.over = ScaledByAll()
    h = self.over(h, ei)
a row for each edge from outside a message
    top: class Scaled(gnn.MessagePassing):
    top:     def forward(self, x, ei):
    top:         self.factor = torch.ones(ei.size(1), 1, dtype=x.dtype)
    top:         return self.propagate(ei, x=x)
    top:     def message(self, x_j):
    top:         return x_j * self.factor  # here
    made: self.over = Scaled()
    h = self.over(h, ei)
    says: with a row for each edge, but a message runs on some edges at a time
an aggregation that is off centre
    top: class OffCentre(gnn.aggr.Aggregation):
    top:     def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
    top:         return self.reduce(x - x.mean(0), index, ptr, dim_size, dim)  # here
    made: self.over = gnn.SAGEConv(8, 8, aggr=OffCentre())
    h = self.over(h, ei)
attention weights by their mean
    made: self.over = gnn.GATConv(8, 8)
    h, (_, alpha) = self.over(h, ei, return_attention_weights=True)
    h = h * alpha.mean()  # here
    says: `mean` puts rows together, over the edges
softmax over rows in a network
    made: self.over = gnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.Softmax(0)))
    h = self.over(h, ei)  # here
    says: puts rows together, over the nodes
attention between rows in a network
    made: self.over = gnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0)))
    h = self.over(h, ei)  # here
    says: puts rows together, over the nodes
an activation over rows
    made: self.over = gnn.FiLMConv(8, 8, act=partial(torch.softmax, dim=0))
    h = self.over(h, ei)  # here
    says: puts rows together, over the nodes
a table by how often
    made: self.over = nn.Embedding(9, 8, scale_grad_by_freq=True)
    h = h + self.over(y)  # here
    says: divides its gradient by how often an index
a bag of rows
    made: self.over = nn.EmbeddingBag(2, 8)
    h = h + self.over((x[:, :2] > 0).long())  # here
    says: `embedding_bag` puts together depends on its offsets
"""

ON_SEVERAL = """
one mask for all rows
    h = h * (torch.rand(8, dtype=h.dtype) > 0.5)  # here
    says: is the same for all rows here, and every rank draws another
one factor for all rows
    h = h * torch.rand((), dtype=h.dtype)  # here
    says: is the same for all rows here, and every rank draws another
one label for all rows
    h = h + self.emb(torch.randint(2, (1,)))  # here
    says: is the same for all rows here, and every rank draws another
a branch on the number of nodes
    h = h.relu() if n > 100 else h  # here
a branch at the number of nodes
    h = h if n == 136 else h.tanh()  # here
"""

LEAVING = """
rows of the places of a mask
    rows, columns = (h.detach() > 0).nonzero(as_tuple=True)
    h = h.index_put((rows, columns), rows.double(), accumulate=True)  # here
places of a mask | h = h + (h.detach() > 0).nonzero().double().mean()
a dataclass with a loss | return Out(self.last(h, ei), h.square().mean())
a dataclass with a number | return Out(self.last(h, ei), float(h.detach().mean()))
a namespace with a loss | return SimpleNamespace(rows=self.last(h, ei), aux=h.var())
a dict with a loss | return {"rows": self.last(h, ei), "aux": h.norm()}
an object with a loss
    box = Box()
    box.rows, box.aux = self.last(h, ei), h.square().mean()  # here
    return box
an object of lists with a loss
    box = Box()
    box.all = [{"rows": self.last(h, ei), "aux": [h.square().mean()]}]  # here
    return box
left on a box
    made: self.box = Box()
    self.box.aux = h.square().mean()  # here
left on a module | self.lin.aux = h.square().mean()
left in a list
    made: self.seen = []
    self.seen.append(h.abs().max())  # here
left by a hook
    top: SEEN = []
    made: self.lin.register_forward_hook(lambda mod, given, out: SEEN.append(out.square().mean()))  # here
    h = self.lin(h)
left by a hook before
    top: SEEN = []
    made: self.lin.register_forward_pre_hook(lambda mod, given: SEEN.append(given[0].var()))  # here
    h = self.lin(h)
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
weights that meet rows | h = h + self.lin.weight.square().sum()
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
all rows by their number | h = h[:n] + h[0:] + h[:] + h[-n:] + h[: len(h)] + h[...] + h.narrow(0, 0, n)
all rows set
    h = h.clone()
    h[:] = h * 2
pieces of channels | h = torch.cat([part * (i + 1) for i, part in enumerate(h.split(50, 1))], 1)
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
a line of channels | h = h * torch.linspace(0, 1, 8) + torch.eye(8)[3] + torch.arange(8)
zeros of own size | h = h + torch.zeros(n, 8) + h.new_zeros(n, 1) + torch.zeros_like(h)
ones of own size | h = h * torch.ones(n)[:, None] + torch.full((n, 8), 0.5)
views by size | h = h.view(n, -1).view(*h.shape[:-1], 2, 4).flatten(1).reshape(n * 2, 4).view(n, 8)
heads by size | h = h.view(n, 2, 4).transpose(1, 2).reshape(n, 8)
there and back | h = h.t().contiguous().t() + h.t().reshape(8, n).t() + h.mT.mT
unflattened | h = h.unflatten(1, (2, 4)).flatten(1)
transposed and weighted | h = (self.lin.weight.softmax(0) @ h.t()).t()
expanded to own size | h = h + self.scale.expand(n, -1) + self.scale.repeat(n, 1) + self.scale[None].expand_as(h)
own size asserted | assert h.size(0) == x.size(0) and h.shape == (n, 8) and h.dim() == 2
NumPy, sizes of channels | h = h.view(n, int(np.prod(h.shape[1:]))) / np.sqrt(h.size(1))
NumPy, draws for channels | h = h * torch.as_tensor(np.random.RandomState(0).rand(8))
the width as a number | h = h / int(h.size(1)) / math.sqrt(h.size(-1)) * {8: 2.0}.get(h.size(1), 1.0)
a loop over channels | h = sum(h * torch.tensor([1.0] * h.size(1)) for i in range(h.size(1)))
constants of functions | h = F.pad(h[:, :7], (0, 1), value=0.5) + F.huber_loss(h, -h, reduction="none", delta=0.5)
a tensor of constants | h = h * h.new_tensor([1.0, 2.0] * 4) + torch.tensor([0.1, 0.2])[1] + torch.full((8,), 0.5)
values of parameters
    span = torch.tensor([self.scale.detach().min(), self.scale.detach().max()])
    h = (h - span[0]).clamp(max=float(self.scale.detach().mean()) + 1) / (span[1] - span[0])
a branch on a parameter | h = 2 * h if self.scale.sum() > 0 else h
gradients of messages that are clipped
    message: m = x_j.tanh()
    message: if m.requires_grad:
    message:     m.register_hook(lambda g: g.clamp(-0.1, 0.1))
    message: return m
constants in a message | message: return x_j * torch.tensor([0.5, 2.0] * 4) / x_j.size(1) + torch.zeros_like(x_j)
a mask in a message
    message: b = x_j.clone()
    message: b[ea[:, 0] > 0] = 0
    message: b[:, :100] *= 2
    message: return b * w
rows of edges at their nodes
    made: self.up = nn.Linear(4, 8)
    h = h + torch.zeros_like(h).index_add(0, ei[1], self.up(ea) * h[ei[1]])
"""
