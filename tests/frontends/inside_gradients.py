"""Hooks and functions whose backward treats rows of a gradient one by one, or not.

How the tables are read: `inside_model.py`.
"""

MIXING = """
a norm of a gradient inside
    h.register_hook(lambda g: g / g.norm())  # here
    after: pass
the sign of the gradient of a weight made inside
    weight = self.lin.weight * 1.0
    weight.register_hook(lambda g: g.sign())  # here
    h = h @ weight
    after: pass
a module's gradients by the largest
    made: self.lin.register_full_backward_hook(lambda m, i, o: tuple(g / g.abs().max() for g in i))  # here
    h = self.lin(h)
    after: pass
a function whose backward averages
    top: class Averaging(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, h, weight):
    top:         ctx.save_for_backward(h, weight)
    top:         return h @ weight
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         h, weight = ctx.saved_tensors
    top:         return grad @ weight.t(), h.t() @ grad / h.size(0)  # here
    h = Averaging.apply(h, self.lin.weight)
    after: pass
a function that takes the sign of a weight's gradient
    top: class Sign(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, weight):
    top:         return weight * 1.0
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         return grad.sign()  # here
    h = h @ Sign.apply(self.lin.weight)
    after: pass
the gradient of a squared total | h = h - torch.func.grad(lambda z: (z.tanh().mean() * 10).square())(h)
"""

ROW_WISE = """
a function that binarises rows and a weight
    top: class Binary(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, given):
    top:         ctx.save_for_backward(given)
    top:         return given.sign()
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         return grad * (ctx.saved_tensors[0].abs() <= 0.8)
    h = Binary.apply(h) @ Binary.apply(self.lin.weight * 1.0)
a module's gradients clamped
    made: self.lin.register_full_backward_hook(lambda m, i, o: tuple(g.clamp(-0.3, 0.3) for g in i))
    h = self.lin(h)
a parameter's gradient normalised
    after: model.lin.weight.register_hook(lambda g: g / g.norm())
    h = self.lin(h)
the output's gradient doubled | after: out.register_hook(lambda g: 2 * g)
the output's gradient clamped | after: out.register_hook(lambda g: g.clamp(-0.5, 0.5))
rows of the output's gradient normalised | after: out.register_hook(lambda g: g / g.norm(dim=1, keepdim=True))
the output's gradient looked at
    after: model.seen = []
    after: out.register_hook(model.seen.append)
a parameter's gradient halved
    after: model.lin.weight.register_hook(lambda g: g / 2)
    h = self.lin(h)
a parameter's gradient masked
    after: model.lin.weight.register_hook(lambda g: g * torch.eye(8))
    h = self.lin(h)
a gradient clamped inside | h.register_hook(lambda g: g.clamp(-0.5, 0.5))
"""
