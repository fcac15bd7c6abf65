"""Operations on rows inside a model: those that mix rows by their places, and others that look like them and do not.

How the tables are read: `inside_model.py`.
"""

MIXING_BY_PLACE = """
roll by 28 rows | h = h.roll(28, 0)
roll of rows and channels | h = h.roll((35, 1), (0, 1))
roll of the transposed | h = h.t().roll(56, 1).t()
roll of all entries | h = h.roll(8 * 28)
rows above a far diagonal | h = h.triu(-20)
rows above a diagonal, transposed | h = h.t().tril(20).t()
a triangle as a mask | h = h * torch.ones_like(h).tril(-30)
zeros on the diagonal
    h = h.clone()
    h.fill_diagonal_(0.0)  # here
the diagonal | h = h + h.diagonal()
renorm of columns | h = h.renorm(2, 1, 6.0)
renorm of columns in place
    h = h.clone()
    h.renorm_(1, 1, 9.0)  # here
renorm of columns by the largest | h = h.renorm(float("inf"), 1, 2.5)
renorm of columns in a message | message: return x_j.renorm(2, 1, 6.0)
roll of edges in a message | message: return x_j.roll(28, 0)
a triangle in a message | message: return x_j.triu(-20)
dilated convolution over nodes
    made: self.kernel = nn.Parameter(torch.randn(8, 1, 3))
    h = F.conv1d(h.t()[None], self.kernel, padding=9, dilation=9, groups=8)[0].t()  # here
Conv1d over nodes | nn.Conv1d(8, 8, 3, padding=1) | h = self.over(h.t()[None])[0].t()
Conv2d over nodes and channels | nn.Conv2d(1, 1, 3, padding=1) | h = self.over(h[None, None])[0, 0]
transposed convolution over nodes | nn.ConvTranspose1d(8, 8, 3, padding=1) | h = self.over(h.t()[None])[0].t()
maximum of windows of nodes | h = F.max_pool1d(h.t()[None], 3, 1, 1)[0].t()
mean of windows of nodes | h = F.avg_pool1d(h.t()[None], 31, 1, 15)[0].t()
windows by unfold | h = F.pad(h, (0, 0, 1, 1)).unfold(0, 3, 1).mean(2)
adaptive pooling over nodes | h = h + F.adaptive_avg_pool1d(h.t()[None], 1)[0].t()
interpolation over nodes | h = F.interpolate(h.t()[None], scale_factor=2)[0, :, :n].t()
response norm over nodes | h = F.local_response_norm(h[None], 25)[0]
instance norm over nodes | h = F.instance_norm(h.t()[None])[0].t()
group norm over nodes | h = F.group_norm(h.t()[None], 2)[0].t()
layer norm over nodes | h = F.layer_norm(h.t(), (n,)).t()
rows moved by padding | h = F.pad(h, (0, 0, 45, 0))[:n]
rows moved by joining | h = torch.cat([h.new_zeros(45, 8), h])[:n]
differences of rows | h = F.pad(torch.diff(h, dim=0), (0, 0, 1, 0))
half a turn | h = torch.rot90(h, 2)
flip of both | h = h.flip(0, 1)
largest so far | h = h.cummax(0)[0]
sum of exponentials so far | h = h.t().logcumsumexp(1).t()
product so far | h = h.cumprod(0)
Fourier transform of both | h = torch.fft.fft2(h).real
LSTM over nodes | nn.LSTM(8, 8) | h = self.over(h)[0]
attention over nodes | h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
encoder over nodes | nn.TransformerEncoderLayer(8, 2, 8, 0.0) | h = self.over(h)
similarity of all pairs | h = h + F.cosine_similarity(h[:, None], h[None], -1).mean(1, keepdim=True)
covariance of channels | h = h @ torch.cov(h.t())
orthogonal columns | h = torch.linalg.qr(h)[0]
whitened by Cholesky | h = torch.linalg.solve_triangular(torch.linalg.cholesky(h.t() @ h), h.t(), upper=False).t()
singular vectors | h = torch.linalg.svdvals(h) * h
places in the sorted column | h = h + torch.searchsorted(h[:, 0].detach().sort()[0], h.detach())
ranks of rows | h = h + h.argsort(0).argsort(0)
the row of the largest | h = h * (1 + h.argmax(0))
rows by order of a score | h = h[h[:, 0].argsort()]
standardised | h = (h - h.mean(0)) / h.std(0)
standardised by one call | h = h / torch.std_mean(h, 0)[0]
norm of the matrix | h = h / torch.linalg.matrix_norm(h)
all rows through one layer | h = h + self.lin(h.sum(0))
squares of the Gram matrix | h = torch.linalg.multi_dot([h, h.t(), h]).tanh()
trace by einsum | h = h * torch.einsum("nc,nc->", h, h).rsqrt()
dot of flat rows | h = h / torch.dot(h.reshape(-1), h.reshape(-1)).sqrt()
softmax of all entries | h = h.reshape(-1).softmax(0).view(n, 8) * 100
gumbel over nodes | h = h * F.softmax(h[:, :1], dim=0)
each row with the one before | h = torch.stack([row + h[i - 1] for i, row in enumerate(h)])
rows for self-loops before those of edges
    made: self.over = gnn.GraphConv(8, 8)
    edges, _ = utils.add_self_loops(ei, num_nodes=n)
    h = self.over(h, edges, torch.cat([w.new_ones(n), w]))  # here
"""

ROW_WISE = """
a branch that every number of nodes takes
    h = h.relu() if n > 5 else h
    h = h.tanh() if n == 7 else h
roll of channels | h = h.roll(3, 1)
a triangle of each row | h = h.view(n, 2, 4).tril().view(n, 8)
the diagonal of each row | h = h + h.view(n, 2, 4).diagonal(0, 1, 2).sum(1, keepdim=True)
renorm of rows | h = h.renorm(2, 0, 1.0)
renorm of rows in a message | message: return x_j.renorm(2, 0, 1.0)
roll of channels in a message | message: return x_j.roll(3, 1) * w
convolution over channels | nn.Conv1d(1, 2, 3, padding=1) | h = self.over(h[:, None]).mean(1)
convolution over an image per node
    made: self.over = nn.Conv2d(1, 3, (1, 3), padding=(0, 1))
    h = self.over(h.view(n, 1, 2, 4)).mean(1).flatten(1)
convolution with a kernel of one node | nn.Conv1d(8, 8, 1) | h = self.over(h.t()[None])[0].t()
transposed convolution over channels | nn.ConvTranspose1d(1, 1, 3, padding=1) | h = self.over(h[:, None])[:, 0]
maximum of windows of channels | h = F.max_pool1d(h[:, None], 3, 1, 1)[:, 0]
mean of windows of channels | h = F.avg_pool1d(h[:, None], 3, 1, 1)[:, 0]
windows of channels by unfold | h = h + h.unfold(1, 4, 2).mean(2).sum(1, keepdim=True)
adaptive pooling of channels | h = h * F.adaptive_avg_pool1d(h[:, None], 2)[:, 0].repeat(1, 4)
interpolation of channels | h = F.interpolate(h[:, None], scale_factor=2)[:, 0, ::2]
response norm of channels | h = F.local_response_norm(h[:, :, None], 3)[:, :, 0]
instance norm of channels | h = F.instance_norm(h.view(n, 2, 4)).flatten(1)
group norm of channels | h = F.group_norm(h, 2)
layer norm | h = F.layer_norm(h, (8,))
RMS norm | nn.RMSNorm(8) | h = self.over(h)
batch norm of all ranks | nn.BatchNorm1d(8) | h = self.over(h)
channels moved by padding | h = F.pad(h, (2, 0))[:, :8]
differences of channels | h = F.pad(torch.diff(h, dim=1), (1, 0))
half a turn of each row | h = torch.rot90(h.view(n, 2, 4), 2, (1, 2)).reshape(n, 8)
flip of channels | h = h.flip(-1)
largest channel so far | h = h.cummax(1)[0]
sum of exponentials of channels so far | h = h.logcumsumexp(1)
product of channels so far | h = h.tanh().cumprod(1)
Fourier transform of channels | h = torch.fft.irfft(torch.fft.rfft(h, dim=1) * self.scale[:5], 8, dim=1)
LSTM over a time per node | nn.LSTM(4, 8, batch_first=True) | h = self.over(h.view(n, 2, 4))[0][:, -1]
LSTM with times first | nn.LSTM(4, 8) | h = self.over(h.view(n, 2, 4).transpose(0, 1))[1][0][0]
GRU over a time per node | nn.GRU(4, 8, batch_first=True) | h = self.over(h.view(n, 2, 4))[1][0]
a cell per node | nn.LSTMCell(8, 8) | h = self.over(h, (h.tanh(), torch.zeros_like(h)))[0]
attention of heads
    q = h.view(n, 1, 2, 4)
    h = F.scaled_dot_product_attention(q, q, q).flatten(1)
attention of channels as a module
    made: self.over = nn.MultiheadAttention(4, 2, batch_first=True)
    h = self.over(*[h.view(n, 2, 4)] * 3)[0].flatten(1)
encoder over a time per node
    made: self.over = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    h = self.over(h.view(n, 2, 4)).flatten(1)
softmax of each row | h = h.softmax(1)
logarithm of softmax | h = h.log_softmax(-1)
several heads | h = (h.view(n, 2, 4) * self.scale.view(2, 4)).sum(-1, keepdim=True).expand(n, 2, 4).reshape(n, 8)
einsum of a weight | h = torch.einsum("nc,dc->nd", h, self.lin.weight)
einsum with heads | h = torch.einsum("nhc,hcd->nhd", h.view(n, 2, 4), self.lin.weight[:4].view(2, 4, 4)).reshape(n, 8)
einsum of outer products | h = torch.einsum("ni,nj,ijk->nk", h[:, :2], h[:, 2:4], self.lin.weight[:4].view(2, 2, 8))
bilinear | nn.Bilinear(8, 6, 8) | h = self.over(h, x)
gated linear unit | h = F.glu(torch.cat([h, h.tanh()], 1))
stack of channels | h = torch.stack([h, h.relu(), -h], 1).mean(1)
stack in front | h = torch.stack([h, h.relu(), -h]).amax(0)
chunks of channels
    a, b = h.chunk(2, 1)
    h = torch.cat([a * b, a + b], 1)
channels one by one | h = torch.stack([c * (i + 1) for i, c in enumerate(h.unbind(1))], 1)
channels by picks | h = h[:, [1, 0, 3, 2, 5, 4, 7, 6]]
one label per node | h = h + F.one_hot(y, num_classes=8)
a table of labels | h = h + self.emb(y)
a functional table | h = h + F.embedding(y, self.lin.weight)
largest channels
    top, at = h.topk(3, 1)
    h = torch.zeros_like(h).scatter(1, at, top)
channels in order | h = h.sort(1, descending=True)[0]
the largest channel | h = h + h.gather(1, h.argmax(1, keepdim=True))
channels taken along | h = torch.take_along_dim(h, h.argsort(1), 1)
a class per node | h = h * h.gather(1, y[:, None])
mask of nodes set to zero
    h = h.clone()
    h[m] = 0
mask of nodes computed
    out = torch.zeros_like(h)
    out[m] = self.lin(h[m])
    h = h + out
both sides of a mask
    out = torch.empty_like(h)
    out[m], out[~m] = h[m].tanh(), h[~m].relu()
    h = out
mask of labels | h = torch.where((y < 3)[:, None], h, -h)
mask by values | h = h * (h.norm(dim=1, keepdim=True) > 2)
mask filled in | h = h.masked_fill(~m[:, None], 0.5)
where | h = torch.where(h > 0, h, 0.1 * h)
normalised rows | h = F.normalize(h)
length of rows | h = h / torch.linalg.vector_norm(h, dim=1, keepdim=True).clamp(min=1)
distances to prototypes | h = torch.cdist(h, self.lin.weight).neg().exp()
nearest prototype | h = h + self.lin.weight[torch.cdist(h, self.lin.weight).argmin(1)]
places among constants | h = h + torch.bucketize(h.detach(), torch.linspace(-2, 2, 5))
dropout of nothing | h = F.dropout(h, 0.0) + 0 * F.dropout(h, 0.5)
noise of size zero | h = h + 0 * torch.randn_like(h) + 0 * torch.rand(n, 1)
mean of each row | h = h - h.mean(1, keepdim=True)
variance of each row | h = h / (h.var(1, keepdim=True) + 1).sqrt()
quantile of each row | h = h - h.quantile(0.5, 1, keepdim=True)
median of each row | h = h - h.median(1, keepdim=True)[0]
orthogonal columns per node | h = torch.linalg.qr(h.view(n, 4, 2))[0].reshape(n, 8)
a system per node
    a = h.view(n, 2, 4)
    h = torch.linalg.solve(torch.eye(2) + a @ a.mT, a).reshape(n, 8)
exponential of a matrix per node
    h = (torch.linalg.matrix_exp(h[:, :4].tanh().view(n, 2, 2)) @ h.view(n, 2, 4)).flatten(1)
outer product of a row | h = (h[:, :, None] * h[:, None, :]).sum(2)
each row by vmap | h = torch.vmap(lambda row: row * self.scale)(h)
a weight of a length and a direction | nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) | h = self.over(h)
prelu with a weight per channel | h = F.prelu(h, self.scale)
channels in place
    h = h.clone()
    h[:, 0] = 1
    h[:, 2:4] = h[:, 4:6] * 2
added to some channels | h = h.index_add(1, torch.tensor([0, 0, 3]), h[:, :3])
scattered to channels | h = h.scatter_add(1, y[:, None], h[:, :1])
the degree of a node | h = h / utils.degree(ei[1], n, h.dtype).clamp(min=1)[:, None]
sums over edges by scatter | h = h + utils.scatter(h[ei[0]] * w[:, None], ei[1], 0, n, "sum")
softmax over edges
    alpha = utils.softmax((h[ei[0]] * h[ei[1]]).sum(1), ei[1], num_nodes=n)
    h = utils.scatter(alpha[:, None] * h[ei[0]], ei[1], 0, n)
edges through a layer | nn.Linear(4, 8) | h = h.index_add(0, ei[1], self.over(ea) * h[ei[0]])
edges of a kind
    some = ei[:, kind == 1]
    h = h + utils.scatter(h[some[0]], some[1], 0, n)
softmax in a message | message: return x_j * (x_i * x_j).softmax(1) * w
a layer norm in a message | message: return F.layer_norm(x_j + x_i, (8,)) * w
convolution over channels in a message
    made: self.own.over = nn.Conv1d(1, 1, 3, padding=1)
    message: return self.over(x_j[:, None])[:, 0] + ea.sum(1, keepdim=True)
picked channels in a message | message: return x_j.gather(1, x_i.argsort(1)) * w
jumping knowledge | gnn.JumpingKnowledge("lstm", 8, 2) | h = self.over([h, h.tanh(), self.lin(h)])
an MLP of PyG | gnn.MLP([8, 16, 8], norm="layer_norm") | h = self.over(h)
similarity to a direction | nn.Parameter(torch.randn(8)) | h = h * F.cosine_similarity(h, self.over[None])[:, None]
channels by what is counted | h = h.view(len(h), h.numel() // len(h) // 2, 2).flatten(1)
where a mask picks few
    h = h.clone()
    h[x[:, 0] > 1.5] += 1.0
    degree = utils.degree(ei[1], n, h.dtype)
    degree[degree > 2.5] += 1.0
    h = h / (1 + degree)[:, None]
columns of the places of a mask
    rows, columns = (h.detach() > 0).nonzero(as_tuple=True)
    h = h.index_put((rows, columns), columns.double(), accumulate=True)
a weight for each channel in a message
    made: self.own.over = nn.Parameter(torch.randn(8))
    message: return torch.cat([x_j[:, :4] * self.over[:4], x_j[:, 4:] * self.over[4:]], 1) * w
patches of an image of each row | h = F.unfold(h.view(-1, 1, 2, 4), 2, stride=2).flatten(1)
products with matrices for all
    made: self.over = nn.Parameter(torch.randn(1, 4, 8, 2))
    h = torch.matmul(h[:, None, None], self.over).reshape(n, 8)
ones like the ends of edges
    ones = torch.ones_like(ei[1], dtype=h.dtype)
    h = h / (1 + torch.zeros(n).index_add(0, ei[1], ones))[:, None]
sums at the sources of edges | h = h + torch.zeros_like(h).index_add(0, ei[0], h[ei[1]] * w[:, None])
shapes put together | h = h.view((*h.shape[:1], 2, 4)).reshape(x.shape[0], h.shape[1:].numel())
the smaller of equal sizes | h = h[: min(x.size(0), h.size(0))]
the larger of a size and the largest id | h = h + torch.zeros(max(int(ei.max()) + 1, x.size(0)), 1)
a branch on any rows | h = h.relu() if x.size(0) > 1 and len(x.shape) == 2 else h
joined rows viewed | h = torch.cat([h, h]).view(2, h.size(0), 8).sum(0)
sizes that are ints | h = h * (2 if isinstance(x.size(0), int) and isinstance(x.shape, torch.Size) else 1)
ones over edges | h = h + torch.zeros(h.size(0)).index_add(0, ei[1], torch.ones(ei.size(1)))[:, None]
sizes of a spectrum | h = h + torch.fft.rfft(h, dim=1).abs().sum(1, keepdim=True)
a constant kernel of one node | h = F.conv1d(h.t()[None], torch.ones(8, 8, 1, dtype=h.dtype))[0].t()
softmax of columns in a network | gnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.Softmax(1))) | h = self.over(h, ei)
a norm in a network | gnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) | h = self.over(h, ei)
a norm of PyG in a network | gnn.GINConv(nn.Sequential(nn.Linear(8, 8), gnn.GraphNorm(8))) | h = self.over(h, ei)
an activation over columns | gnn.FiLMConv(8, 8, act=partial(torch.softmax, dim=1)) | h = self.over(h, ei)
a table with a row of padding | nn.Embedding(9, 8, padding_idx=0) | h = h + self.over(y)
the same draws on every rank | h = h * (torch.rand(8, generator=torch.Generator().manual_seed(0)) > 0.5)
GCN as the tutorial writes it
    top: class Custom(gnn.MessagePassing):
    top:     def __init__(self):
    top:         super().__init__()
    top:         self.lin = nn.Linear(8, 8)
    top:     def forward(self, x, ei):
    top:         ei, _ = utils.add_self_loops(ei, num_nodes=x.size(0))
    top:         row, col = ei
    top:         deg = utils.degree(col, x.size(0), dtype=x.dtype)
    top:         scale = deg.pow(-0.5)
    top:         scale[scale == float("inf")] = 0
    top:         return self.propagate(ei, x=self.lin(x), norm=scale[row] * scale[col])
    top:     def message(self, x_j, norm):
    top:         return norm.view(-1, 1) * x_j
    made: self.over = Custom()
    h = self.over(h, ei)
a sum over all ranks
    alone: it asks the communicator
    total = h.sum(0) if self.comm is None else sp.all_reduce_sum(h.sum(0), self.comm)
    h = h - total / 136
attention of every edge
    made: self.over = gnn.GATConv(8, 8)
    h, (edges, alpha) = self.over(h, ei, return_attention_weights=True)
    h = h + torch.zeros_like(h).index_add(0, edges[1], alpha.expand(-1, 8).relu())
"""
