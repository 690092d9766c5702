#!/usr/bin/env python3
"""Where the warps of a resident kernel wait: joins samples of program counters with the kernel's machine code.

    stalls.py SAMPLES CUBIN [LOW-HIGH]

SAMPLES is what CUPTI's sample program `pc_sampling_utility` prints, CUBIN the kernel that ran (`amk inspect kernel
--cubin`, or a file of the cache without its first 40 bytes). Without a third argument: the inner loops that took at
least half a per cent of all samples, with what their warps waited for. With two addresses: each instruction between
them, its share, the cycles a warp spent at it per execution, and the two largest reasons. How to take samples:
docs/guide/tracing.md.
"""

import collections
import re
import subprocess
import sys

KERNEL = "amk_megakernel"
INNER = 2500  # most instructions of a loop that is shown: the others are the kernel's own
REASON = "smsp__pcsamp_warps_issue_stalled_"


def samples(path):
    """Counts of each reason by address. `selected` counts the times that an instruction was issued."""
    at = collections.defaultdict(collections.Counter)
    for line in open(path, encoding="utf-8"):
        found = re.match(r"functionName: (\w+), .*?pcOffset: (\d+),.*?stallReasonCount: \d+, (.*)", line)
        if found is None or found[1] != KERNEL:
            continue
        for reason, count in (part.rsplit(": ", 1) for part in found[3].split(", ")):
            if not reason.endswith("_not_issued"):
                at[int(found[2])][reason.removeprefix(REASON)] += int(count)
    return at


def instructions(cubin):
    """Addresses and texts of the kernel's instructions, and the addresses that its labels stand for."""
    listing = subprocess.run(["nvdisasm", cubin], check=True, capture_output=True, text=True).stdout
    code, labels, waiting, function = [], {}, [], None
    for line in listing.splitlines():
        if found := re.match(r"\s*\.section\s+\.text\.(\w+),", line):
            function = found[1]
        elif function != KERNEL:
            continue
        elif found := re.match(r"\s*(\.L_x_\d+):", line):
            waiting.append(found[1])
        elif found := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?);", line):
            labels.update((label, int(found[1], 16)) for label in waiting)
            waiting.clear()
            code.append((int(found[1], 16), found[2]))
    return code, labels


def largest(reasons, n):
    total = sum(reasons.values()) or 1
    return ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in reasons.most_common(n))


def show_loops(at, code, labels, total):
    for end, text in code:
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        begin = labels.get(jump[1], end) if jump else end
        body = [a for a, _ in code if begin <= a <= end] if begin < end else []
        sums = sum((at[a] for a in body), collections.Counter())
        if len(body) <= INNER and sum(sums.values()) >= total / 200:
            share = 100 * sum(sums.values()) / total
            print(f"{begin:#x}-{end:#x} {len(body):5} instructions {share:5.1f}%  {largest(sums, 6)}")


def show_instructions(at, code, total, low, high):
    for address, text in code:
        if low <= address <= high and (count := sum(at[address].values())):
            cycles = count / max(at[address]["selected"], 1)
            print(f"{address:#x} {100 * count / total:6.2f}% {cycles:7.1f}  {text:60} {largest(at[address], 2)}")


def main(arguments):
    if len(arguments) not in (2, 3):
        sys.exit(__doc__)
    at = samples(arguments[0])
    code, labels = instructions(arguments[1])
    total = sum(sum(reasons.values()) for reasons in at.values())
    if total == 0:
        sys.exit(f"{arguments[0]} has no sample of {KERNEL}")
    if len(arguments) == 2:
        show_loops(at, code, labels, total)
    else:
        low, high = (int(end, 16) for end in arguments[2].split("-"))
        show_instructions(at, code, total, low, high)


if __name__ == "__main__":
    main(sys.argv[1:])
