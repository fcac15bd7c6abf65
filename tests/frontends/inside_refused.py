"""Programs that were refused though right, and programs whose refusals must say what helps.

How the tables are read: `inside_model.py`.
"""

MUST_RUN = """
one-hot labels by a mask
    t = torch.zeros(n, 8)
    t[m, y[m]] = 1
    h = h + t
one-hot labels by index_put | h = h + h.new_zeros(n, 8).index_put((m, y[m]), torch.ones(()))
rows written into a matrix of each node
    r, c = torch.triu_indices(4, 4, offset=1)
    a = h.new_zeros(n, 4, 4)
    a[:, r, c] = h[:, :6]
    h = h + (a - a.mT).flatten(1)[:, :8]
systems with a column for each row
    root = torch.linalg.cholesky(torch.eye(8) * 2 + torch.ones(8, 8) / 8)
    h = torch.linalg.solve_triangular(root, h.T, upper=False).T + torch.linalg.solve(root, h.T).mT
a system for each row
    a = torch.eye(4).to(h) + torch.einsum("ni,nj->nij", h[:, :4], h[:, :4])
    h = torch.cat([torch.linalg.solve(a, h[:, 4:]), h[:, :4]], 1)
numbers of another kind in the same bits
    bits = h.detach().contiguous().view(torch.int64).view(torch.int32)
    h = h * (1 + (bits[:, 1::2] >> 20 & 1))
a product written into a tensor
    with torch.no_grad():
        z = torch.mm(h, torch.ones(8, 8), out=torch.empty_like(h)).tanh()
    h = h + z
an image of each node in a grid of its own
    grid = F.affine_grid(h[:, :6].view(n, 2, 3), (n, 1, 2, 4), align_corners=False)
    h = F.grid_sample(h.view(n, 1, 2, 4), grid, align_corners=False).view(n, 8)
instances that are normalised by channel
    made: self.norm = nn.InstanceNorm1d(2, affine=True)
    h = self.norm(h.view(n, 2, 4)).flatten(1)
channels as whole numbers
    zero = torch.zeros(8, dtype=torch.int32)
    h = h + torch.fake_quantize_per_channel_affine(h.detach().float(), torch.ones(8).float(), zero, 1, -32, 31)
gradients by several vectors at once
    z = h.tanh() * h
    v = torch.eye(8).to(h)[:2, None].expand(2, *h.shape)
    (g,) = torch.autograd.grad(z, h, v, create_graph=True, is_grads_batched=True)
    h = h + g.movedim(0, 1).sum(1)
a class picked on both sides of a mask
    out = h.new_empty(n)
    out[m], out[~m] = h[m, y[m]], h[~m, 0]
    h = h * out[:, None]
a class picked of every row | h = h * h[torch.arange(n), y][:, None]
some channels by a mask
    out = h.clone()
    out[m, 2] = 0.5
    out[m, 3:5] = h[m, 5:7].tanh()
    h = out
a mixture of experts
    made: self.experts = nn.Parameter(torch.randn(8, 8, 8) / 3)
    r, c = torch.arange(n)[:, None], h.topk(2, 1)[1]
    found = torch.einsum("nc,ecd->ned", h, self.experts)
    h = (h.softmax(1)[r, c, None] * found[r, c]).sum(1)
a mixture of experts, expert by expert
    made: self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    top, chosen = h.softmax(1).topk(2, 1)
    out = torch.zeros_like(h)
    for e, expert in enumerate(self.experts):
        rows, slots = torch.where(chosen == e)
        out.index_add_(0, rows, expert(h[rows]) * top[rows, slots, None])
    h = out
a mixture of experts, all rows by where
    made: self.experts = nn.Parameter(torch.randn(8, 8, 8) / 3)
    gates = h.softmax(1) * (h >= h.topk(2, 1)[0][:, 1:])
    r, c = torch.where(gates > 0)
    out = torch.einsum("rc,rcd->rd", h[r], self.experts[c]) * gates[r, c, None]
    h = torch.zeros_like(h).index_add(0, r, out)
a mixture of experts by masks
    made: self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    chosen = h[:, :3].argmax(1)
    out = torch.zeros_like(h)
    for e, expert in enumerate(self.experts):
        out[chosen == e] = expert(h[chosen == e])
    h = out * h[:, :3].softmax(1)[torch.arange(n), chosen, None]
a normal distribution
    found = torch.distributions.Normal(h, F.softplus(h) + 0.1, validate_args=True)
    h = found.log_prob(x[:, :1]) + found.entropy()
a sample of a normal distribution
    found = torch.distributions.Normal(h, F.softplus(h) + 0.1)
    h = found.mean + 0 * found.rsample()
a categorical distribution
    found = torch.distributions.Categorical(logits=h)
    h = h + (found.log_prob(y) + found.entropy())[:, None]
a Bernoulli distribution | h = torch.distributions.Bernoulli(probs=h.sigmoid()).log_prob(m[:, None].to(h))
independent normals
    d = torch.distributions
    h = h + d.Independent(d.Normal(h, 1 + h.square()), 1).log_prob(torch.zeros_like(h))[:, None] / 50
a divergence of distributions
    d = torch.distributions
    h = d.kl_divergence(d.Normal(h, h.exp().clamp(max=9) + 0.1), d.Normal(torch.zeros_like(h), torch.ones_like(h)))
a beta distribution | h = torch.distributions.Beta(F.softplus(h) + 1, torch.ones_like(h)).log_prob(x[:, :1].sigmoid())
a Dirichlet distribution | h = h + torch.distributions.Dirichlet(F.softplus(h) + 1).mean
the likelihood of normals, checked
    h = F.gaussian_nll_loss(h, x[:, :1].expand(n, 8), F.softplus(h) + 0.1, reduction="none")
an equilibrium of a layer of rows
    top: def pulled(f, z):
    top:     def hook(g):
    top:         found = g
    top:         for step in range(30):
    top:             found = torch.autograd.grad(f, z, found, retain_graph=True)[0] + g
    top:         return found
    top:     return hook
    with torch.no_grad():
        z = torch.zeros_like(h)
        for step in range(30):
            z = torch.tanh(0.3 * self.lin(z) + h)
    z = torch.tanh(0.3 * self.lin(z) + h)
    z0 = z.detach().clone().requires_grad_()
    fz = torch.tanh(0.3 * self.lin(z0) + h)
    z.register_hook(pulled(fz, z0))
    h = z
a slope inside
    z = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(self.lin(z).tanh().sum(), z)
    h = h - 0.1 * slope
a slope with given gradients
    z = self.lin(h)
    (slope,) = torch.autograd.grad(z.tanh(), z, torch.ones_like(z), retain_graph=True)
    h = z * slope
a slope through a layer
    z = h.detach().requires_grad_()
    (force,) = torch.autograd.grad(self.last(z, ei).square().sum(), z)
    h = h - 0.1 * force
a slope of the features
    z = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(self.first(z, ei).tanh().sum(), z)
    h = h + force.sum(1, keepdim=True)
a slope of edge values
    z = ea.detach().requires_grad_()
    energy = torch.zeros(n, 4).index_add(0, ei[1], z.square() * h.detach()[ei[0]][:, :4])
    (force,) = torch.autograd.grad(energy.sum(), z)
    h = h + torch.zeros(n, 4).index_add(0, ei[1], force).repeat(1, 2)
a checkpoint of a function with a layer
    h = checkpoint(lambda h, ei: self.last(self.lin(h).relu(), ei), h, ei, use_reentrant=False)
a checkpoint of the model's own method
    top: def block(self, x, ei):
    top:     return self.lin(self.first(x, ei).relu())
    made: type(self).block = block
    alone: the method is one of the model that is wrapped
    h = h + checkpoint(self.block, x, ei, use_reentrant=False)
two checkpoints of the model's own method
    top: def block(self, x, ei):
    top:     return self.last(x, ei).relu()
    made: type(self).block = block
    alone: the method is one of the model that is wrapped
    for step in range(2):
        h = checkpoint(self.block, h, ei, use_reentrant=False)
two checkpoints of methods with layers
    top: class Block(nn.Module):
    top:     def __init__(self):
    top:         super().__init__()
    top:         self.conv = gnn.GATConv(8, 8)
    top:     def block(self, x, ei):
    top:         return self.conv(x, ei).relu()
    top:     def forward(self, x, ei):
    top:         for step in range(2):
    top:             x = checkpoint(self.block, x, ei, use_reentrant=False)
    top:         return x
    made: self.over = Block()
    h = self.over(h, ei)
a linear layer per kind | gnn.HeteroLinear(8, 8, 8) | h = self.over(h, y)
a linear layer per kind of three | gnn.HeteroLinear(8, 4, 3) | h = torch.cat([self.over(h, y % 3), h[:, :4]], 1)
an update that reads the index
    top: class Mean(gnn.MessagePassing):
    top:     def forward(self, x, ei):
    top:         return self.propagate(ei, x=x)
    top:     def update(self, out, index, dim_size):
    top:         return out / utils.degree(index, dim_size, out.dtype).clamp(min=1)[:, None]
    made: self.over = Mean()
    h = self.over(h, ei)
an update that reads rows and the index
    top: class Gap(gnn.MessagePassing):
    top:     def forward(self, x, ei, w):
    top:         return self.propagate(ei, x=x, w=w)
    top:     def message(self, x_j, w):
    top:         return x_j * w[:, None]
    top:     def update(self, out, x, w, index, dim_size):
    top:         return out - x * x.new_zeros(dim_size).index_add(0, index, w)[:, None]
    made: self.over = Gap()
    h = self.over(h, ei, w)
a Laplacian
    lap, value = utils.get_laplacian(ei, w, "sym", num_nodes=n)
    h = utils.scatter(h[lap[0]] * value[:, None], lap[1], 0, n)
a random walk's Laplacian
    lap, value = utils.get_laplacian(ei, None, "rw", h.dtype, n)
    h = h + gnn.SimpleConv("sum")(h, lap, value)
"""

WORDS = """
a loss inside
    return F.cross_entropy(self.last(h, ei), y)  # here
    says: (sp|shardpass)\\.cross_entropy
    never: readout
a loss of some nodes inside
    return F.cross_entropy(self.last(h, ei)[m], y[m])  # here
    says: (sp|shardpass)\\.cross_entropy
    never: readout
a likelihood inside
    return F.nll_loss(self.last(h, ei).log_softmax(1), y)  # here
    says: (sp|shardpass)\\.(cross_entropy|mean)
    never: readout
a squared error inside
    return F.mse_loss(self.last(h, ei), torch.zeros_like(h))  # here
    says: (sp|shardpass)\\.mean
    never: readout
a loss by a module
    made: self.loss = nn.CrossEntropyLoss()
    return self.last(h, ei), self.loss(self.last(h, ei), y)  # here
    says: (sp|shardpass)\\.cross_entropy
finite, asserted
    assert torch.isfinite(h).all()  # here
    never: readout
no NaN, by a branch
    if torch.isnan(h).any():  # here
        raise ValueError("NaN")
    never: readout
edges in order
    e = ei[:, ei[1].argsort()]  # here
    h = self.last(h, e)
    says: partition
    never: readout
a dense matrix
    a = utils.to_dense_adj(ei, max_num_nodes=n)[0]  # here
    h = a.t() @ h
    says: layer|SimpleConv
    never: readout
a sparse product
    a = torch.sparse_coo_tensor(torch.stack([ei[1], ei[0]]), w.detach(), (n, n))  # here
    h = torch.sparse.mm(a, h)  # here
    says: SimpleConv
    never: readout
the bits of the number
    h = h / n.bit_length()  # here
    says: total_nodes
a table with a bound
    made: self.over = nn.Embedding(9, 8, max_norm=0.5)
    h = h + self.over(y)  # here
    says: max_norm
a slope of a mean
    z = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(self.lin(z).tanh().mean(), z)  # here
    h = h - slope
a fixed point found by a norm
    z = torch.zeros_like(h)
    for step in range(50):
        z, before = torch.tanh(0.3 * self.lin(z) + h), z
        if (z - before).norm() < 1e-3:  # here
            break
    h = z
"""
