"""Without copies: write blocks directly into the store's memory, and read them there."""

import numpy as np

import kvtide

LAYOUT = kvtide.Layout.attention(layers=2, heads=2, head_dim=128, dtype="float16", block_tokens=16)
SHAPE = (2, 2, 2, 16, 128)  # [layer][K|V][head][token][dim]


def main() -> None:
    prompt = list(range(64))
    with kvtide.open(dram={"budget": "64MiB"}) as store:
        session = store.session(kvtide.Model(LAYOUT, weights="tiny-model@v1"))

        # Reserve slots, let the engine write them, then seal the reservation. Before that, the blocks cannot be read;
        # without ``seal`` the slots are freed at the end of the ``with`` block.
        with session.reserve(prompt) as reservation:
            for number, view in zip(reservation.depths, reservation.views, strict=True):
                np.frombuffer(view, np.float16).reshape(SHAPE)[:] = number
            with session.match(prompt) as match:
                print("while it is written:", match)
            reservation.seal()

        # A view is the store's memory. It does not change while the match is held.
        with session.match(prompt) as match:
            print("sealed:             ", match)
            for number, view in enumerate(session.load(match).wait().blocks):
                block = np.frombuffer(view, np.float16).reshape(SHAPE)
                print(f"block {number}: mean {block.mean():.1f}, read-only: {view.readonly}")


if __name__ == "__main__":
    main()
