"""Store the KV of a prompt, find it for another prompt with the same beginning, and read it back."""

import numpy as np

import kvtide


def main() -> None:
    # A model with 2 layers of 2 KV heads; a block is the KV of 16 tokens.
    layout = kvtide.Layout.attention(layers=2, heads=2, head_dim=64, dtype="float16", block_tokens=16)
    model = kvtide.Model(layout, weights="tiny-model@v1")
    with kvtide.open(dram={"budget": "64MiB"}) as store:
        session = store.session(model)
        prompt = list(range(100, 150))  # token ids: three full blocks and two more tokens

        # The engine has computed the prompt: [layer][K|V][head][token][dim] for each block.
        blocks = [np.random.rand(2, 2, 2, 16, 64).astype(np.float16) for _ in range(3)]
        print("stored:", session.store(prompt, blocks))

        # Another request begins with the same tokens: match finds how much of it need not be computed.
        question = [*prompt[:40], 7, 8, 9]
        with session.match(question) as match:
            buffers = [np.empty((2, 2, 2, 16, 64), np.float16) for _ in match.wanted["full"]]
            loaded = session.load(match, into=buffers).wait()
            print(f"{loaded.tokens} of {len(question)} tokens came from the store")
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(buffers, blocks, strict=False))


if __name__ == "__main__":
    main()
