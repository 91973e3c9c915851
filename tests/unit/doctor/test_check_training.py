"""What `lockstep check` says of order, random numbers, splits, gradients and losses, and of the same lines as they should be."""

# ruff: noqa: E501 - lines of scripts as people write them

import ast

import pytest

from lockstep.doctor.scripts import check_source

SCRIPT = """\
import datetime, os, random, time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs, label


class Buckets(Sampler):
    def __init__(self, data, batch_size, rank, world_size):
        self.data, self.batch_size, self.rank, self.world_size, self.epoch = data, batch_size, rank, world_size, 0

    def __len__(self):
        return len(self.data) // self.batch_size // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.data), generator=generator)[self.rank :: self.world_size].tolist()
        for first in range(0, len(order), self.batch_size):
            yield order[first : first + self.batch_size]

    def set_epoch(self, epoch):
        self.epoch = epoch


def seed_worker(worker_id):
    pass


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + rank)
    data = Noisy(TensorDataset(torch.arange(256.0).view(64, 4), torch.zeros(64).long()))
    start_epoch = torch.load("last.pt", map_location="cpu")["epoch"] if os.path.exists("last.pt") else 0
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(start_epoch, 3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
"""
SAMPLER = (
    "sampler = DistributedSampler(data)\n    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)"
)
BATCHES = (
    "sampler = Buckets(data, 8, rank, world_size)\n    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)"
)
SET = "        sampler.set_epoch(epoch)\n"
ITEM = "        return inputs, label"
SEED = "torch.manual_seed(7 + rank)"
MODEL = "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))"
LOSS = "loss = F.cross_entropy(model(inputs), labels)"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
LOOP = "    for epoch in range(start_epoch, 3):\n"
DATA = "    start_epoch ="
Edits = list[tuple[str, str]]

MISTAKES: list[tuple[str, Edits]] = [
    ("set-epoch", [(SAMPLER, BATCHES), (SET, "")]),
    ("set-epoch", [(SAMPLER, "loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))"), (SET, ""), ("in loader", "in enumerate(loader)")]),
    ("weighted-mean", [(LOSS, LOSS.replace("labels)", "labels, weight=weights)"))]),
    ("weighted-mean", [(LOSS, f"{LOSS} + nn.CrossEntropyLoss(torch.ones(3))(model(inputs), labels)")]),
    ("same-epoch", [(SET, "        sampler.set_epoch(0)\n")]),
    ("same-epoch", [(SET, "        sampler.set_epoch(start_epoch)\n")]),
    ("same-epoch", [(SET, ""), (LOOP, f"    sampler.set_epoch(start_epoch)\n{LOOP}")]),
    ("resumed-epoch", [(SET, "        if epoch > start_epoch:\n            sampler.set_epoch(epoch)\n")]),
    ("resumed-epoch", [(SET, ""), (STEP, f"{STEP}        sampler.set_epoch(epoch + 1)\n")]),
    ("resumed-epoch", [(LOOP, "    for epoch in range(3 - start_epoch):\n")]),
    ("resumed-epoch", [(LOOP, f"    for inputs, labels in loader:\n        model(inputs).mean().backward()\n        optimizer.step()\n{LOOP}")]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), (LOSS, f"inputs = inputs + 0.1 * torch.randn_like(inputs)\n            {LOSS}")]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), (LOSS, f"inputs = inputs + torch.empty_like(inputs).normal_(0, 0.1)\n            {LOSS}")]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), (MODEL, MODEL.replace("nn.ReLU()", "nn.Dropout(0.1)"))]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), (LOSS, f"{LOSS} + F.dropout(inputs, 0.2).mean()")]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), (ITEM, "        return inputs + torch.randn(4), label")]),
    ("one-seed", [(SEED, "random.seed(7)\n    torch.manual_seed(7)"), (ITEM, "        return inputs * random.uniform(0.9, 1.1), label")]),
    ("one-seed", [(SEED, "np.random.seed(7)"), (", num_workers=2", ""), (ITEM, "        return inputs + np.random.normal(0, 1, 4), label")]),
    ("one-seed", [("    pass", "    np.random.seed(worker_id)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), (ITEM, "        return inputs + np.random.normal(0, 1, 4), label")]),
    ("one-seed", [(SEED, "seed_everything(7)"), ("    pass", "    pass\n\n\ndef seed_everything(seed):\n    random.seed(seed)\n    torch.manual_seed(seed)"), (ITEM, "        return inputs + torch.randn(4), label")]),
    ("own-split", [(DATA, f"    data = Subset(data, torch.randperm(len(data))[rank::world_size])\n{DATA}")]),
    ("own-split", [(DATA, f"    order = np.random.permutation(len(data))\n    mine = order[rank::world_size]\n{DATA}")]),
    ("own-split", [(DATA, f"    order = list(range(64))\n    random.shuffle(order)\n    train, val = Subset(data, order[:48]), Subset(data, order[48:])\n{DATA}")]),
    ("own-split", [(DATA, f"    order = torch.randperm(64).tolist()\n    size = 64 // world_size\n    mine = order[rank * size : (rank + 1) * size]\n{DATA}")]),
    ("own-split", [(SEED, "init_seeds(7 + rank)"), (DATA, f"    data = Subset(data, torch.randperm(len(data))[rank::world_size])\n{DATA}")]),
    ("own-split", [(DATA, f"    train, val = torch.utils.data.random_split(data, [48, 16])\n{DATA}")]),
    ("norm-summed", [(STEP, f"            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            dist.all_reduce(norm)\n{STEP}")]),
    ("norm-summed", [(STEP, f"            total = sum(p.grad.norm() ** 2 for p in model.parameters())\n            dist.all_reduce(total, op=dist.ReduceOp.SUM)\n            scale = 1.0 / total.sqrt()\n{STEP}")]),
    ("norm-summed", [(STEP, f"            total = torch.zeros(())\n            for p in model.parameters():\n                total += p.grad.pow(2).sum()\n            dist.all_reduce(total)\n{STEP}")]),
    ("gradients-summed", [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                dist.all_reduce(p.grad)\n")]),
    ("gradients-summed", [(BACKWARD, f"{BACKWARD}            for name, p in net.named_parameters():\n                if p.grad is not None:\n                    dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)\n")]),
    ("gradients-summed", [(BACKWARD, f"{BACKWARD}            sync(model)\n"), ("def main", "def sync(network):\n    for p in network.parameters():\n        dist.all_reduce(p.grad)\n\n\ndef main")]),
    ("gradients-summed", [(BACKWARD, f"{BACKWARD}            flat = torch.cat([p.grad.view(-1) for p in model.parameters()])\n            dist.all_reduce(flat)\n")]),
    ("loss-divided", [(LOSS, f"{LOSS} / world_size")]),
    ("loss-divided", [(BACKWARD, "            (loss / dist.get_world_size()).backward()\n")]),
    ("loss-divided", [(BACKWARD, f"            loss /= world_size\n{BACKWARD}")]),
    ("loss-divided", [(LOSS, f"{LOSS}\n            loss = loss / (4 * world_size)")]),
    ("loss-divided", [(BACKWARD, "            loss.div(world_size).backward()\n")]),
    ("loss-divided", [("def main", "def objective(output, labels):\n    return F.cross_entropy(output, labels) / dist.get_world_size()\n\n\ndef main"), (LOSS, "loss = objective(model(inputs), labels)")]),
    ("gradients-summed", [(BACKWARD, f"{BACKWARD}            for group in optimizer.param_groups:\n                for p in group['params']:\n                    dist.all_reduce(p.grad)\n")]),
    ("inner-module", [("optimizer = torch", "inner = model.module\n    optimizer = torch"), (LOSS, "loss = F.cross_entropy(inner(inputs), labels)")]),
    ("inner-module", [(LOSS, "loss = F.cross_entropy(model.module(inputs), labels)")]),
    ("inner-module", [(LOSS, "loss = F.cross_entropy(model.module.forward(inputs), labels)")]),
    ("own-folder", [(DATA, f'    folder = f"runs/{{datetime.datetime.now():%H%M%S}}"\n    os.makedirs(folder, exist_ok=True)\n{DATA}')]),
    ("own-folder", [(DATA, f'    folder = os.path.join("runs", time.strftime("%Y%m%d-%H%M%S"))\n    path = os.path.join(folder, "log.txt")\n    log = open(path, "w")\n{DATA}')]),
    ("own-folder", [(DATA, f'    os.makedirs("runs/run_%d" % int(time.time()))\n{DATA}')]),
    ("own-folder", [(DATA, f'    folder = "runs/run_%d" % int(time.time())\n    os.makedirs(folder)\n{DATA}')]),
    ("set-epoch", [(SAMPLER, BATCHES), (SET, ""), (LOOP, "    epoch = start_epoch\n    while epoch < 3:\n"), (STEP, f"{STEP}        epoch += 1\n")]),
    ("resumed-epoch", [(LOOP, "    for ep in range(start_epoch, 3):\n"), (SET, "        if ep > start_epoch:\n            sampler.set_epoch(ep)\n")]),
    ("one-seed", [(SEED, "torch.manual_seed(7)"), ("def main", "class Coder(nn.Module):\n    def forward(self, inputs):\n        return self.sample(inputs)\n\n    def sample(self, mean):\n        return mean + torch.randn_like(mean)\n\n\ndef main")]),
    ("one-seed", [("    pass", "    np.random.seed(worker_id)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), ("def main", "class Jitter:\n    def __call__(self, inputs):\n        return inputs + np.random.normal(0, 1, 4)\n\n\ndef main")]),
    ("own-split", [(DATA, f"    parts = np.array_split(np.random.permutation(64), world_size)\n    data = Subset(data, parts[rank])\n{DATA}")]),
    ("norm-summed", [(STEP, f"            clip([p for p in model.parameters()])\n{STEP}"), ("def main", "def clip(parameters):\n    squares = [(p.grad ** 2).sum() for p in parameters]\n    total = torch.stack(squares).sum()\n    dist.all_reduce(total)\n\n\ndef main")]),
    ("inner-module", [(LOSS, "loss = model.module.compute_loss(inputs, labels)")]),
    ("gradients-divided", [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad /= world_size\n")]),
    ("gradients-divided", [(BACKWARD, f"{BACKWARD}            for p in net.parameters():\n                if p.grad is not None:\n                    p.grad.data.div_(dist.get_world_size())\n")]),
    ("gradients-divided", [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad = p.grad / float(world_size)\n")]),
    ("gradients-divided", [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad.mul_(1.0 / world_size)\n")]),
    ("one-seed", [(ITEM, "        return inputs + rng.normal(0, 1, 4), label"), ("def main", "rng = np.random.default_rng(0)\n\n\ndef main")]),
    ("one-seed", [(DATA, f"    own = torch.Generator().manual_seed(0)\n{DATA}"), (LOSS, f"inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=own)\n            {LOSS}")]),
    ("one-seed", [(DATA, f"    own = torch.Generator()\n    own.manual_seed(7)\n{DATA}"), (LOSS, f"inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=own)\n            {LOSS}")]),
    ("one-seed", [(DATA, f"    own = np.random.RandomState(7)\n{DATA}"), (LOSS, f"inputs = inputs + torch.as_tensor(own.normal(0, 0.1, inputs.shape))\n            {LOSS}")]),
    ("padded-evaluation", [("    dist.destroy", "    tests = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))\n    evaluate(model, tests)\n    dist.destroy"), ("def main", "def evaluate(network, test_loader):\n    network.eval()\n    for inputs, labels in test_loader:\n        network(inputs)\n\n\ndef main")]),
]  # fmt: skip
RIGHT: list[Edits] = [
    [],
    [(LOSS, LOSS.replace("labels)", "labels, weight=None)"))],
    [(LOSS, LOSS.replace("labels)", "labels, weights, reduction='sum')"))],
    [(LOSS, f"{LOSS.replace('labels)', 'labels, weights)')}  # its total, divided by what all ranks have\n            loss = ls.mean_over_ranks(loss * own, own)")],
    [("    dist.destroy", "    with torch.no_grad():\n        F.cross_entropy(model(inputs), labels, weight=weights)\n    dist.destroy")],
    [("    dist.destroy", "    tests = DataLoader(data, sampler=ls.DistributedSampler(data, shuffle=False, pad=False))\n    with torch.no_grad():\n        for inputs, labels in tests:\n            model(inputs)\n    dist.destroy")],
    [(SAMPLER, BATCHES)],
    [(SAMPLER, BATCHES), (SET, "        loader.batch_sampler.set_epoch(epoch)\n")],
    [(SAMPLER, BATCHES), (SET, ""), ("    def __iter__(self):\n", "    def __iter__(self):\n        self.epoch += 1\n")],
    [(SET, "        sampler.set_epoch(epoch + 17)\n")],
    [(SET, ""), (STEP, f"{STEP}        sampler.set_epoch(epoch + 1)\n"), (LOOP, f"    sampler.set_epoch(start_epoch)\n{LOOP}")],
    [(SET, ""), (STEP, f"{STEP}        sampler.set_epoch(epoch + 1)\n"), (LOOP, "    for epoch in range(3):\n")],
    [(SET, "        if isinstance(loader.sampler, DistributedSampler):\n            loader.sampler.set_epoch(epoch)\n")],
    [(SET, ""), (LOOP, f"    number = start_epoch\n{LOOP}        sampler.set_epoch(number)\n        number += 1\n")],
    [(LOOP, "    for epoch in range(3 - start_epoch):\n"), (SET, "        sampler.set_epoch(start_epoch + epoch)\n")],
    [(LOOP, f"    sampler.set_epoch(start_epoch)\n    for inputs, labels in loader:\n        model(inputs).mean().backward()\n        optimizer.step()\n{LOOP}")],
    [(LOOP, f"    for _ in range(3):  # warm up\n        model(torch.ones(8, 4)).mean().backward()\n{LOOP}")],
    [(SEED, "torch.manual_seed(7)")],
    [(SEED, "torch.manual_seed(7)"), (LOSS, f"inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=own)\n            {LOSS}"), (DATA, f"    own = torch.Generator().manual_seed(rank)\n{DATA}")],
    [(LOSS, f"inputs = inputs + 0.1 * torch.randn_like(inputs)\n            {LOSS}")],
    [(SEED, "torch.manual_seed(7)"), (MODEL, f"{MODEL}\n    torch.manual_seed(7 + rank)"), (ITEM, "        return inputs + torch.randn(4), label")],
    [(SEED, "random.seed(7)"), (LOSS, f"inputs = inputs * random.choice([1, 2])  # agreed on\n            {LOSS}")],
    [(SEED, "torch.manual_seed(7)"), (MODEL, f"{MODEL}\n    nn.init.normal_(net[0].weight)\n    net[2].weight.data.normal_()")],
    [("    pass", "    np.random.seed(torch.initial_seed() % 2**32)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), (ITEM, "        return inputs + np.random.normal(0, 1, 4), label")],
    [("    pass", "    worker_seed = torch.initial_seed() % 2**32\n    np.random.seed(worker_seed)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), (ITEM, "        return inputs + np.random.normal(0, 1, 4), label")],
    [("    pass", "    info = torch.utils.data.get_worker_info()\n    random.seed(info.seed)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), (ITEM, "        return inputs * random.uniform(0.9, 1.1), label")],
    [(SEED, "np.random.seed(7)"), (ITEM, "        return inputs * random.uniform(0.9, 1.1), label")],
    [(SEED, "np.random.seed(7 + rank)"), ("    pass", "    np.random.seed(worker_id)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), ("def main", "class MixUp:\n    def __call__(self, inputs):\n        return inputs + np.random.normal(0, 1, 4)\n\n\ndef main")],
    [(LOOP, "    epoch = start_epoch\n    while epoch < 3:\n"), (STEP, f"{STEP}        epoch += 1\n")],
    [(DATA, f"    parts = np.array_split(np.random.default_rng(0).permutation(64), world_size)\n    data = Subset(data, parts[rank])\n{DATA}")],
    [(SEED, "seed_everything(7 + rank)"), ("    pass", "    pass\n\n\ndef seed_everything(seed):\n    random.seed(seed)\n    torch.manual_seed(seed)"), (ITEM, "        return inputs + torch.randn(4), label")],
    [(SEED, "seed = 7\n    seed += rank\n    torch.manual_seed(seed)"), (ITEM, "        return inputs + torch.randn(4), label")],
    [(DATA, f"    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))\n    data = Subset(data, order[rank::world_size])\n{DATA}")],
    [(SEED, "torch.manual_seed(7)"), (DATA, f"    data = Subset(data, torch.randperm(len(data))[rank::world_size])\n{DATA}")],
    [(DATA, f"    order = torch.randperm(64)\n    dist.broadcast(order, 0)\n    data = Subset(data, order[rank::world_size])\n{DATA}")],
    [(SEED, "fix_random_seeds()"), (DATA, f"    data = Subset(data, torch.randperm(len(data))[rank::world_size])\n{DATA}")],
    [(LOSS, f"chosen = torch.randperm(8)[:4]\n            {LOSS}")],
    [(DATA, f"    data = Subset(data, list(range(64))[rank::world_size])\n{DATA}")],
    [(STEP, f"            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{STEP}")],
    [(STEP, f"            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            dist.all_reduce(norm, op=dist.ReduceOp.MAX)\n{STEP}")],
    [(BACKWARD, f"{BACKWARD}            total = loss.detach().clone()\n            dist.all_reduce(total)\n            total /= world_size\n")],
    [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                dist.all_reduce(p.grad)\n                p.grad /= world_size\n")],
    [(BACKWARD, f"            with model.no_sync():\n    {BACKWARD}            for p in model.parameters():\n                dist.all_reduce(p.grad)\n")],
    [("model = DDP(net)", "model = net"), (BACKWARD, f"            loss = loss / world_size\n{BACKWARD}            for p in model.parameters():\n                dist.all_reduce(p.grad)\n")],
    [(MODEL, f"{MODEL}\n    head = nn.Linear(3, 3)"), (BACKWARD, f"{BACKWARD}            for p in head.parameters():\n                dist.all_reduce(p.grad)\n")],
    [(LOSS, f"{LOSS}\n            loss = loss / 4")],
    [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad /= 4  # micro-batches\n")],
    [(LOSS, f"{LOSS} * world_size"), (BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad /= world_size\n")],
    [("model = DDP(net)", "model = net"), (BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad /= world_size\n            grads = [p.grad for p in model.parameters()]\n            for each in grads:\n                dist.all_reduce(each)\n")],
    [(BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                norm = p.grad.norm() / world_size\n")],
    [(ITEM, "        rng = np.random.default_rng(index)\n        return inputs + rng.normal(0, 1, 4), label")],
    [(ITEM, "        return inputs + rng.normal(0, 1, 4), label"), ("def main", "rng = np.random.default_rng([7, int(os.environ['RANK'])])\n\n\ndef main")],
    [(DATA, f"    rng = random.Random(0)\n    kept = [each for each in range(64) if rng.random() < 0.9]\n    data = Subset(data, kept)\n{DATA}")],
    [(DATA, f"    own = np.random.RandomState(7)\n{DATA}"), (LOSS, f"inputs = inputs * own.uniform(0.5, 2)  # agreed on\n            {LOSS}")],
    [(SEED, "torch.manual_seed(7)"), (BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad += 0.01 * torch.randn_like(p)\n")],
    [(DATA, f"    noise = torch.Generator().manual_seed(3)\n{DATA}"), (BACKWARD, f"{BACKWARD}            for p in model.parameters():\n                p.grad += 0.01 * torch.randn(p.shape, generator=noise)\n")],
    [(DATA, f"    own = torch.Generator()\n    own.manual_seed(7 + rank)\n{DATA}"), (LOSS, f"inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=own)\n            {LOSS}")],
    [(DATA, f"    own = torch.Generator().manual_seed(0)\n{DATA}"), (LOSS, f"chosen = torch.randint(64, (16,), generator=own)\n            inputs, labels = data[chosen[rank::world_size]]\n            {LOSS}")],
    [(LOSS, f"count = torch.tensor(float(len(labels)))\n            dist.all_reduce(count)\n            {LOSS.replace('labels)', 'labels, reduction=' + repr('sum') + ')')} * world_size / count")],
    [("    dist.destroy", "    with torch.no_grad():\n        model.module(inputs)\n    dist.destroy")],
    [(LOSS, f"for p in model.parameters():\n                p.requires_grad = False\n            {LOSS.replace('model(', 'model.module(')}")],
    [(LOSS, f"set_requires_grad(model, False)\n            {LOSS.replace('model(', 'model.module(')}")],
    [(BACKWARD, f"            if not torch.isfinite(loss):\n                print('Loss is', loss.item(), 'stopping')\n                raise SystemExit(1)\n{BACKWARD}")],
    [(STEP, f"{STEP}            mean_of_epoch = 0.9 * loss.item()\n            if rank == 0:\n                print(f'train loss {{mean_of_epoch:.4f}}')\n")],
    [(DATA, f'    if rank == 0:\n        os.makedirs(f"runs/{{datetime.datetime.now():%H%M%S}}")\n{DATA}')],
    [(DATA, f'    folder = f"runs/{{datetime.datetime.now():%H%M%S}}"\n    names = [folder]\n    dist.broadcast_object_list(names)\n    os.makedirs(names[0], exist_ok=True)\n{DATA}')],
    [(DATA, f'    folder = f"runs/{{datetime.datetime.now():%H%M%S}}"\n    if rank == 0:\n        os.makedirs(folder, exist_ok=True)\n{DATA}')],
    [(DATA, f'    os.makedirs(os.path.join("runs", time.strftime("%Y-%m-%d")), exist_ok=True)\n{DATA}')],
    [(DATA, f'    os.makedirs(f"runs/{{datetime.date.today()}}", exist_ok=True)\n{DATA}')],
    [(SET, ""), (LOOP, f"{LOOP}        sampler = DistributedSampler(data, seed=epoch)\n        loader = DataLoader(data, batch_size=8, sampler=sampler)\n"), (SAMPLER, "pass")],
    [(SEED, "torch.manual_seed(7)"), ("def main", "class Drop(nn.Module):\n    def forward(self, inputs):\n        return inputs if torch.rand([]) < 0.1 else 2 * inputs\n\n\ndef main")],
    [(SEED, "torch.manual_seed(7)"), (LOSS, f"chosen = torch.randint(64, (16,))\n            inputs, labels = data[chosen[rank::world_size]]\n            {LOSS}")],
    [(LOSS, f"count = torch.tensor(8.0)\n            dist.all_reduce(count)\n            {LOSS} / (count / world_size).clamp(min=1)")],
    [(SEED, "torch.manual_seed(7)"), ("    pass", "    seed = torch.initial_seed() + dist.get_rank()\n    random.seed(seed)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), (ITEM, "        return inputs * random.uniform(0.9, 1.1), label")],
    [(SEED, "torch.manual_seed(7)"), ("    pass", "    torch.manual_seed(100 * dist.get_rank() + worker_id)"), ("num_workers=2", "num_workers=2, worker_init_fn=seed_worker"), ("def main", "class RandomErase(nn.Module):\n    def forward(self, inputs):\n        return inputs * torch.rand(4)\n\n\ndef main")],
    [(STEP, f"{STEP}            took = str(datetime.timedelta(seconds=time.time() - 3))\n            torch.save(took, f'{{rank}}.pt')\n")],
    [(DATA, f'    start = time.time()\n    with open("data.bin", "rb") as file:\n        took = time.time() - start\n{DATA}')],
]  # fmt: skip


def script_with(edits: Edits) -> str:
    script = SCRIPT
    for old, new in edits:
        assert script.count(old) >= 1, old
        script = script.replace(old, new, 1)
    ast.parse(script)
    return script


@pytest.mark.parametrize(("rule", "edits"), MISTAKES)
def test_a_planted_mistake_is_found(rule: str, edits: Edits) -> None:
    found = check_source(script_with(edits))
    assert found is not None
    assert [each.rule for each in found] == [rule]
    ast.parse(found[0].mended)


@pytest.mark.parametrize("edits", RIGHT)
def test_the_same_lines_as_they_should_be_are_left_alone(edits: Edits) -> None:
    assert not check_source(script_with(edits))
