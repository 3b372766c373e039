"""An engine in a process of its own: reads prompts as lines of JSON, and says what came of each.

Storage may answer later than an engine waits for it, on cores that others use too. So what others wrote is awaited
first; all the rest is as an engine does it.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

import kvtide
from kvtide.engines.transformers import attach
from tests.engines.models import padded, smollm2, tiny


def main(name: str, settings: str) -> None:
    model = smollm2()[0] if name == "smollm2" else tiny()
    with kvtide.open(**json.loads(settings)) as store, attach(model, store) as attached:
        for line in sys.stdin:
            prompt = json.loads(line)
            with store.session(attached.identity()) as session:
                session.match(np.array(prompt, np.uint32), wait=60).release()
            if name == "tiny":
                attached.prefill.cost = None  # it computes sooner than any storage answers
            answer = attached.generate(**padded(torch.tensor([prompt])), max_new_tokens=12, do_sample=False)
            assert attached.flush(60)
            assert store.flush(60)
            read = {
                tier: count for what, count in store.statistics().counts.items() if (tier := _read_from(what)) and count
            }
            said = {"tokens": answer.output[0].tolist(), "cached": sum(answer.report.cached), "read": read}
            print(json.dumps(said), flush=True)


def _read_from(what: str) -> str:
    return what.removeprefix("blocks read from ") if what.startswith("blocks read from ") else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
