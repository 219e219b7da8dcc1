"""Reads sampled turns with vLLM's own parsers: a process of vLLM's environment, without a server.

Each line of standard input is a JSON object: `tokenizer` (a folder), `tool_parser` and `reasoning_parser` (vLLM's
names, or null), `tools` (in the OpenAI shape), `thinking` (what the chat template was told), and `turns`: the ids of
its prompt, those of the turn with the token that ends it. Standard output gets a JSON list for it, with reasoning,
content, and calls as names with the text of their arguments per turn; or the exception."""

import json
import sys
from typing import Any

from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager


def read(asked: dict[str, Any]) -> list[Any]:
    """Read each turn as vLLM's chat completions do, with a parser of its own."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked["tokenizer"])
    harmony = asked["tool_parser"] == "openai"
    kind = ParserManager.get_parser(
        tool_parser_name=asked["tool_parser"],
        reasoning_parser_name=asked["reasoning_parser"],
        enable_auto_tools=True,
        is_harmony=harmony,
    )
    thinking = asked["thinking"]
    told = {"enable_thinking": thinking, "thinking": thinking, "reasoning_effort": "high" if thinking else "no_think"}
    found: list[Any] = []
    for prompt, ids in asked["turns"]:
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "x"}], model="m", tools=asked["tools"], tool_choice="auto"
        )
        try:
            parser = kind(tokenizer, request.tools, chat_template_kwargs=told)
            request = parser.adjust_request(request)
            parser.set_prompt_token_ids(prompt)
            text = tokenizer.decode(ids[:-1], skip_special_tokens=request.skip_special_tokens)
            if harmony:
                # it reads the ids of the published tokenizer, and no others
                encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
                ids = encoding.encode(tokenizer.decode(ids), allowed_special="all")
            reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
        except Exception as error:
            # what a foreign parser raises is a finding
            found.append([type(error).__name__, str(error)[:200]])
            continue
        found.append([reasoning, content, [[call.name, call.arguments] for call in calls or []]])
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))), flush=True)
