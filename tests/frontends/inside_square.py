"""Programs on ranks that own eight nodes each, where layers have eight channels: a square of rows and channels.

How the tables are read: `inside_model.py`.
"""

MIXING = """
a layer of nodes | h = self.lin(h.t()).t()
a layer handed channels for nodes | h = self.last(h.t(), ei)
rows by rows | h = h @ h
rows by rows, transposed | h = h @ h.t()
a weight in front | h = self.lin.weight @ h
rows and channels added | h = h + h.t()
rows and channels in one tensor | h = torch.stack([h, h.t()], 1).mean(1)
a weight per entry | h = h * self.lin.weight
a table as rows | h = h + self.lin.weight
a weight per node | h = h * self.scale[:, None]
a diagonal added | h = h + torch.eye(8)
numbers of eight rows | h = h * torch.arange(8)[:, None]
a list of eight | h = h * torch.tensor([1.0, 2.0] * 4)[:, None]
eight rows picked | h = h + h[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])]
a norm of columns | h = F.layer_norm(h.t(), (8,)).t()
a view of eight columns | h = h.reshape(8, n).t()
as large as a weight | h = h + torch.zeros_like(self.lin.weight)
chosen by weights | h = torch.where(self.lin.weight > 0, h, -h)
similarity to itself | h = h + F.cosine_similarity(h[:, None], h[None], -1)
edges' features beside nodes' | h = h + torch.cat([ea, ea], 1)
"""

ROW_WISE = """
a layer | h = self.lin(h)
a weight behind | h = h @ self.lin.weight
a weight in front of the transposed | h = (self.lin.weight @ h.t()).t()
a weight per channel | h = h * self.scale
the unit matrix | h = h @ torch.eye(8) + torch.eye(8)[0]
weights by weights | h = h + (self.lin.weight @ self.lin.weight).softmax(0)[0]
a weight's diagonal | h = h * self.lin.weight.diagonal()
numbers of channels | h = h * torch.arange(8)
eight channels picked | h = h[:, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])]
the first eight channels | h = torch.cat([h, self.lin(h)], 1)[:, :8]
there and back | h = h.t().contiguous().t()
zeros of own size | h = h + h.new_zeros(n, 8) + torch.zeros(n, 1)
rows of a table by label | h = h + self.lin.weight[y] + F.embedding(y, self.lin.weight)
one label per node | h = h + F.one_hot(y, 8)
distances to eight prototypes | h = torch.cdist(h, self.lin.weight)
channel by channel | h = torch.stack([c * (i + 1) for i, c in enumerate(h.unbind(1))], 1)
a group norm | h = F.group_norm(h, 2)
outer products of rows | h = torch.einsum("ni,nj,ij->ni", h, h, self.lin.weight)
attention over eight channels
    made: self.over = nn.MultiheadAttention(1, 1, batch_first=True)
    h = self.over(*[h[:, :, None]] * 3)[0][:, :, 0]
a mean of channels | h = h - h.mean(1, keepdim=True) + h.sum(1)[:, None]
eight sums over edges | h = h + torch.zeros_like(h).index_add(0, ei[1], torch.cat([ea, ea], 1))
"""
