"""Values and mixtures inside a model: numbers made of several rows, what leaves the model, and what may do so.

How the tables are read: `inside_model.py`.
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
gradients of messages that are centred
    message: m = x_j.tanh()
    message: if m.requires_grad:
    message:     m.register_hook(lambda g: g - g.mean(0))  # here
    message: return m
a tensor of a maximum in a message
    message: return x_j * torch.tensor([w.max()])  # here
an item in a message
    message: return x_j * w.mean().item()  # here
"""

LEAVING = """
rows of the places of a mask
    rows, columns = (h.detach() > 0).nonzero(as_tuple=True)
    h = h.index_put((rows, columns), rows.double(), accumulate=True)  # here
places of a mask
    h = h + (h.detach() > 0).nonzero().double().mean()  # here
a dataclass with a loss
    return Out(self.last(h, ei), h.square().mean())  # here
a dataclass with a number
    return Out(self.last(h, ei), float(h.detach().mean()))  # here
a namespace with a loss
    return SimpleNamespace(rows=self.last(h, ei), aux=h.var())  # here
a dict with a loss
    return {"rows": self.last(h, ei), "aux": h.norm()}  # here
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
left on a module
    self.lin.aux = h.square().mean()  # here
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
NumPy, draws for channels
    h = h * torch.as_tensor(np.random.RandomState(0).rand(8))
the width as a number
    h = h / int(h.size(1)) / math.sqrt(h.size(-1)) * {8: 2.0}.get(h.size(1), 1.0)
a loop over channels
    h = sum(h * torch.tensor([1.0] * h.size(1)) for i in range(h.size(1)))
constants of functions
    h = F.pad(h[:, :7], (0, 1), value=0.5) + F.huber_loss(h, -h, reduction="none", delta=0.5)
a tensor of constants
    h = h * h.new_tensor([1.0, 2.0] * 4) + torch.tensor([0.1, 0.2])[1] + torch.full((8,), 0.5)
values of parameters
    span = torch.tensor([self.scale.detach().min(), self.scale.detach().max()])
    h = (h - span[0]).clamp(max=float(self.scale.detach().mean()) + 1) / (span[1] - span[0])
a branch on a parameter
    h = 2 * h if self.scale.sum() > 0 else h
gradients of messages that are clipped
    message: m = x_j.tanh()
    message: if m.requires_grad:
    message:     m.register_hook(lambda g: g.clamp(-0.1, 0.1))
    message: return m
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
