"""A Hugging Face model whose KV is kept: of a prompt that begins like an earlier one, only the rest is computed."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvtide
import kvtide.engines.transformers


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()  # or any model from from_pretrained
    document = torch.randint(2, 1000, (1, 1500))

    def ask(question: torch.Tensor) -> torch.Tensor:
        prompt = torch.cat([document, question], dim=1)
        mask = torch.ones_like(prompt)
        answer: torch.Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False)
        return answer

    with kvtide.open(dram={"budget": "256MiB"}) as store, kvtide.engines.transformers.attach(model, store) as attached:
        for number in range(3):
            question = torch.randint(2, 1000, (1, 30))
            answer = ask(question)
            (prompt,), (cached,), _ = attached.statistics().last
            print(f"question {number}: {cached} of {prompt} tokens came from the store")
        print(attached.statistics())

    assert torch.equal(ask(question), answer)  # detached, the model gives the same answer


if __name__ == "__main__":
    main()
