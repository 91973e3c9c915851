"""Scripts without a mistake, as tutorials teach them: nothing may be reported."""

# ruff: noqa: E501 - lines of scripts as people write them

TORCHRUN = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

from mine import Net, make_data

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
torch.cuda.set_device(local_rank)
torch.manual_seed(17 + dist.get_rank())
train_set = make_data(transforms.RandomCrop(32))
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=32, sampler=sampler)
model = Net().to(local_rank)
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt", map_location="cpu"))
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(epoch, mean.item())
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "last.pt")
dist.destroy_process_group()
"""

SPAWN_WITH_A_CLASS = """\
import os, sys
import torch
import torch.multiprocessing as mp
from torch.distributed import init_process_group, destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from datautils import MyTrainDataset


def ddp_setup(rank, world_size):
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    init_process_group(backend="nccl", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, optimizer, gpu_id, save_every):
        self.gpu_id = gpu_id
        self.model = model.to(gpu_id)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.model = DDP(model, device_ids=[gpu_id])

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[GPU{self.gpu_id}] Epoch {epoch} | Batchsize: {size} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source.to(self.gpu_id), targets.to(self.gpu_id))

    def _save_checkpoint(self, epoch):
        torch.save(self.model.module.state_dict(), "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(dataset))


def main(rank, world_size, save_every, total_epochs, batch_size):
    ddp_setup(rank, world_size)
    dataset, model = MyTrainDataset(2048), torch.nn.Linear(20, 1)
    trainer = Trainer(model, prepare_dataloader(dataset, batch_size), torch.optim.SGD(model.parameters(), 1e-3), rank, save_every)
    trainer.train(total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(torch.cuda.device_count(), 2, 10, 32), nprocs=torch.cuda.device_count())
"""

WITH_AND_WITHOUT_DISTRIBUTED = """\
import argparse, os, shutil
import torch
import torch.distributed as dist
import torch.nn.parallel
from torch.utils.data import DataLoader, Subset
import torchvision.transforms as transforms
import torchvision.datasets as datasets


def main_worker(gpu, ngpus_per_node, args):
    args.gpu = gpu
    if args.distributed:
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    model = make(args.arch)
    if args.distributed and args.gpu is not None:
        args.batch_size = int(args.batch_size / ngpus_per_node)
        model = torch.nn.parallel.DistributedDataParallel(model.cuda(args.gpu), device_ids=[args.gpu])
    else:
        model = torch.nn.DataParallel(model).cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    if args.resume:
        if args.gpu is None:
            checkpoint = torch.load(args.resume)
        else:
            loc = "cuda:{}".format(args.gpu)
            checkpoint = torch.load(args.resume, map_location=loc)
        model.load_state_dict(checkpoint["state_dict"])
    train_dataset = datasets.ImageFolder("train", transforms.Compose([transforms.RandomResizedCrop(224)]))
    val_dataset = datasets.ImageFolder("val")
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    else:
        train_sampler = None
        val_sampler = None
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None), sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size, shuffle=False, sampler=val_sampler)
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, optimizer, epoch)
        acc1 = validate(val_loader, model, args)
        if not args.multiprocessing_distributed or (args.multiprocessing_distributed and args.rank % ngpus_per_node == 0):
            save_checkpoint({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, acc1 > 0)


def train(loader, model, optimizer, epoch):
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model, args):
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
    if args.distributed:
        top1.all_reduce()
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")
"""

LOCAL_RANK_FIRST = """\
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
if args.local_rank not in (-1, 0):
    dist.barrier()
dataset = download()
if args.local_rank == 0:
    dist.barrier()
sampler = DistributedSampler(dataset, shuffle=False)
model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[args.local_rank])
for epoch in range(3):
    for batch in DataLoader(dataset, sampler=sampler):
        model(batch).backward()
        if args.local_rank in (-1, 0):
            logger.info("step")
if dist.get_rank() != 0:
    raise SystemExit
model.module.save_pretrained("out")
"""

ONE_PART_PER_RANK = """\
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Subset, IterableDataset
from torch.nn.parallel import DistributedDataParallel

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(dist.get_rank(), 100, dist.get_world_size())

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
part = Subset(data, range(rank, len(data), size))
model = DistributedDataParallel(net)
for epoch in range(2):
    for batch in DataLoader(part, batch_size=8, shuffle=True):
        model(batch).backward()
    for batch in DataLoader(Stream(), batch_size=8):
        model(batch).backward()
torch.save(model.module.state_dict(), f"rank{rank}.pt")
"""

COLLECTIVES_OF_ALL = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    values = [compute()]
    dist.broadcast_object_list(values)
else:
    values = [None]
    dist.broadcast_object_list(values)
group = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(tensor, group=group)
if rank == 0:
    dist.send(tensor, 1)
elif rank == 1:
    dist.recv(tensor, 0)
dist.gather(tensor, parts if rank == 0 else None)
model = DDP(net)
for batch in batches:
    loss = model(batch)
    bad = (~torch.isfinite(loss)).float()
    dist.all_reduce(bad)
    if bad.item() or not torch.isfinite(loss):
        continue
    loss.backward()
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler

accelerator = Accelerator()
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for epoch in range(3):
    for batch in loader:
        accelerator.backward(model(batch))
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "last.pt")
accelerator.print("done")
"""

EVALUATION_OF_ALL = """\
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP

def setup():
    dist.init_process_group()

def train(model, loader, sampler, epochs):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).mean()
            loss.backward()
        evaluate(model, DataLoader(test_set, batch_size=8))

@torch.no_grad()
def evaluate(model, loader):
    total = torch.zeros(2)
    for batch in loader:
        total += model(batch).sum()
    dist.all_reduce(total)
    log(total)

def log(value):
    if dist.get_rank() != 0:
        return
    print(value)
    torch.save(value, "value.pt")

def main():
    setup()
    sampler = DistributedSampler(train_set, seed=3)
    train(DDP(net), DataLoader(train_set, batch_size=8, sampler=sampler), sampler, 3)
"""

LOCKSTEP = """\
import lockstep as ls
import torch

ls.init_process_group()
sampler = ls.DistributedSampler(data)
model = ls.DistributedDataParallel(net)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in torch.utils.data.DataLoader(data, sampler=sampler):
        model(batch).backward()
if torch.distributed.get_rank() == 0:
    torch.save(model.module.state_dict(), "last.pt")
ls.destroy_process_group()
"""

SAMPLER_FOR_ANOTHER_FILE = """\
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from train_utils import train

dist.init_process_group()
sampler1 = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=4, **{"sampler": sampler1})
for epoch in range(1, 3):
    accuracy = train(model, loader, epoch, sampler=sampler1)
"""

CORRECT = {name.lower(): text for name, text in dict(globals()).items() if name.isupper() and isinstance(text, str)}
