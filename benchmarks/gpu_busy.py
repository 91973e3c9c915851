"""`lockstep devices` before, while and after another process uses the card: is it shown as held, and not taken?"""

import json
import subprocess
import sys
import time
from typing import Any

from gpu_device import DEVICE, IS_CUDA, MIB, card_bytes, name

COMMAND = [sys.executable, "-c", "from lockstep_command import main; main()", "devices"]
HELD_BYTES = 4096 * MIB
SETTLE_SECONDS = 10.0
HOLD = f"""
import select, sys, torch
held = torch.ones({HELD_BYTES if IS_CUDA else MIB}, dtype=torch.uint8, device="{DEVICE}")
product = torch.ones({4096 if IS_CUDA else 8}, 4096, device="{DEVICE}")
print("ready", float((product @ product.T).sum()), flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    float((product @ product.T).sum())
"""
"""Another process: it holds memory and computes until its standard input is closed."""


def look(moment: str) -> dict[str, Any]:
    """Show what the command says; return what it says as JSON."""
    began = time.perf_counter()
    shown = subprocess.run([*COMMAND, "auto", "0"], capture_output=True, text=True, check=True)
    spent = time.perf_counter() - began
    print(f"\n{moment} ({spent:.1f} s):\n{shown.stdout}{shown.stderr}", flush=True)
    document = subprocess.run([*COMMAND, "--json", "auto", "0"], capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(document)
    return found


def takes_card(found: dict[str, Any]) -> list[bool]:
    """Return for each request whether it would take a card."""
    return [any(device["name"] != "cpu" for device in request["devices"]) for request in found["requests"]]


def main() -> None:
    print(name())
    problems = []
    before_bytes = card_bytes()
    before = look("before")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        during = look(f"while process {other.pid} computes")
        other.stdin.close()
    began = time.monotonic()
    while card_bytes() > before_bytes + 300 * MIB and time.monotonic() < began + SETTLE_SECONDS:
        time.sleep(0.2)
    after = look("after")
    if IS_CUDA:
        if not all(takes_card(before)):
            problems.append("before: the free card is not taken")
        if any(takes_card(during)):
            problems.append("while another process computes on it the card would be taken")
        if not all(takes_card(after)):
            problems.append("after: the free card is not taken")
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
