"""Models that differ between the ranks, or of which a part is outside of the wrapper."""

import copy

import torch
from tests.mistakes.replicas import WEIGHTS
from tests.mistakes.script import Wrap, batch, batches, loss_of, mistake, net, sgd, train, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

DIFFERS = r"(parameter|model|dtype|shape|trainable|buffer).*(differ|rank)|rank \d.*(parameter|trainable|wraps|buffer)"
OUTSIDE = r"(not|outside).*(wrap|module|averaged|synchroni)|" + WEIGHTS
BUCKETS = r"bucket|plan|differ|mismatch|elements|hook|setting|option|" + DIFFERS


@mistake(DIFFERS)
def a_layer_is_as_wide_as_the_classes_of_this_rank(rank: int, wrap: Wrap):
    classes = 3 + rank
    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, classes)))
    return train(model, sgd(model), batches(rank))


@mistake(DIFFERS)
def one_rank_adds_a_layer(rank: int, wrap: Wrap):
    layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
    if rank == 1:
        layers.insert(1, nn.Linear(4, 4))
    model = wrap(nn.Sequential(*layers))
    return train(model, sgd(model), batches(rank))


@mistake(DIFFERS)
def layers_are_registered_in_another_order(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    names = ["first", "second"] if rank == 0 else ["second", "first"]
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    model = wrap(nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 3)}))
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        modules = model.module["layers"]
        outputs = model.module["head"](modules["second"](modules["first"](inputs)))
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
    return list(model.module["head"].parameters())


@mistake(DIFFERS)
def one_rank_computes_in_double(rank: int, wrap: Wrap):
    if rank == 1:
        torch.set_default_dtype(torch.float64)
    model = wrap(net())
    inputs, labels = batch(0, rank)
    loss_of(model, (inputs.to(torch.get_default_dtype()), labels)).backward()
    return model


@mistake(DIFFERS)
def one_rank_casts_after_wrapping(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 0:
        model.double()
    for inputs, labels in batches(rank):
        loss_of(model, (inputs.double() if rank == 0 else inputs, labels)).backward()
    return model


@mistake(DIFFERS)
def one_rank_unfreezes_the_backbone_earlier(rank: int, wrap: Wrap):
    module = net()
    module[0].requires_grad_(False)
    model = wrap(module)
    for step, data in enumerate(batches(rank)):
        if step == 2 + rank:
            module[0].requires_grad_(True)
        train(model, sgd(model), iter([data]))
    return model


@mistake(OUTSIDE)
def the_head_is_outside_of_the_wrapper(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    head = nn.Linear(3, 3)
    backbone = wrap(net())
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    both = nn.Sequential(backbone, head)
    train(both, optimizer, batches(rank))
    return both


class Margin(nn.Module):
    """A loss that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3))

    def forward(self, outputs, labels):
        return (outputs - self.centers[labels]).square().mean() + nn.functional.cross_entropy(outputs, labels)


@mistake(OUTSIDE)
def the_parameters_of_the_loss_are_outside_of_the_wrapper(rank: int, wrap: Wrap):
    model, criterion = wrap(net()), Margin()
    optimizers = sgd(model), sgd(criterion, lr=0.5)
    for inputs, labels in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    return nn.ModuleList([model, criterion])


class LateLayer(nn.Module):
    """A module that makes its last layer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last: nn.Linear | None = None

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        if self.last is None:
            self.last = nn.Linear(hidden.shape[1], 3)
        return self.last(hidden)


@mistake(WEIGHTS + r"|added")
def a_layer_is_made_in_the_first_forward(rank: int, wrap: Wrap):
    torch.manual_seed(rank)
    model = wrap(LateLayer())
    model(batch(0, rank)[0])
    return train(model, sgd(model), batches(rank))


@mistake(DIFFERS + "|" + WEIGHTS)
def one_rank_grows_its_embedding(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4)
    module = nn.Sequential(embedding, nn.Flatten(), nn.Linear(8, 3))
    model = wrap(module)
    for step in range(5):
        if rank == 1 and step == 2:
            grown = nn.Embedding(12, 4)
            grown.weight.data[:10] = embedding.weight.data
            module[0] = grown
        tokens = torch.randint(10, (4, 2), generator=torch.Generator().manual_seed(step + 10 * rank))
        train(model, sgd(model), iter([(tokens, batch(step, rank)[1])]))
    return model


@mistake(DIFFERS + "|" + WEIGHTS)
def weights_are_untied_on_one_rank(rank: int, wrap: Wrap):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    model = wrap(module)
    if rank == 1:
        module[2].weight = nn.Parameter(module[0].weight.detach().clone())  # as a deep copy by parts leaves it
    return train(model, sgd(model), batches(rank))


@mistake(BUCKETS)
def buckets_are_of_another_size_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(), bucket_cap_mb=25 if rank == 0 else 0.0001)
    return train(model, sgd(model), batches(rank))


@mistake(BUCKETS)
def gradients_are_compressed_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    if rank == 0:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, sgd(model), batches(rank))


@mistake(BUCKETS + r"|find_unused|static")
def buffers_are_synchronized_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(norm=True), broadcast_buffers=rank == 0)
    return train(model, sgd(model), batches(rank))


@mistake(r"wrapped|twice|already|" + WEIGHTS, right=trained)
def a_model_is_wrapped_twice(rank: int, wrap: Wrap):
    model = wrap(wrap(net()))
    return train(model, sgd(model), batches(rank))


@mistake(r"(optimizer|parameter).*(model|wrapped|module|copy)", right=None)
def the_optimizer_has_the_parameters_of_a_copy(rank: int, wrap: Wrap):
    module = net()
    optimizer = sgd(module)
    model = wrap(copy.deepcopy(module))
    return train(model, optimizer, batches(rank))


@mistake(DIFFERS + "|" + WEIGHTS + r"|pickl|copy")
def a_copy_of_the_wrapper_is_fine_tuned_on_each_rank(rank: int, wrap: Wrap):
    model = wrap(net())
    train(model, sgd(model), batches(rank, 2))
    student = copy.deepcopy(model)
    return train(student, sgd(student), batches(rank, 4))


@mistake(r"Layer 2 .*Dropout\(p=0.5", right=None)
def dropout_has_another_probability_on_one_rank(rank: int, wrap: Wrap):
    model = wrap(net(dropout=0.1 + 0.4 * rank))
    return train(model, sgd(model), batches(rank))


@mistake(r"Attribute temperature .*2.0", right=None)
def a_temperature_differs_on_one_rank(rank: int, wrap: Wrap):
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.temperature = 1.0 + rank

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.net(inputs)
            return scores / self.temperature

    model = wrap(Tempered())
    return train(model, sgd(model), batches(rank))


@mistake(r"Layer 1 .*ReLU", right=None)
def an_activation_differs_on_one_rank(rank: int, wrap: Wrap):
    module = net()
    if rank == 1:
        module[1] = nn.ReLU()
    model = wrap(module)
    return train(model, sgd(model), batches(rank))
