"""`lockstep verify SCRIPT` as a user runs it: a plain script, whose folder is afterwards as before."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
train = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
held = TensorDataset(torch.randn(15, 4), torch.randint(3, (15,)))
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, labels in DataLoader(train, 8, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    dist.all_reduce(loss)
    (loss / dist.get_world_size()).backward()
    optimizer.step()
with torch.no_grad():
    for inputs, labels in DataLoader(held, 4, sampler=DistributedSampler(held, shuffle=False)):
        model(inputs)
torch.save(model.module.state_dict(), "last.pt")
"""


def test_findings_have_lines_and_files_are_put_back(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "last.pt"
    script.write_text(SCRIPT)
    kept.write_text("precious")
    found = subprocess.run(
        [sys.executable, "-m", "lockstep", "verify", str(script), "--workers", "1,2", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stderr
    mistakes = {
        (each["text"][-6:-1], each["line"].rpartition(":")[2])
        for each in json.loads(found.stdout)["findings"]
        if each["level"] == "mistake"
    }
    assert mistakes == {("LS541", "17"), ("LS544", "21"), ("LS545", "23")}
    assert kept.read_text() == "precious"
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "last.pt"}


def test_a_script_that_starts_its_processes_itself_is_not_judged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print)\n")
    command = [sys.executable, "-m", "lockstep", "verify", str(script), "--workers", "1"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stdout
    assert "starts its processes itself" in " ".join(found.stderr.split())
