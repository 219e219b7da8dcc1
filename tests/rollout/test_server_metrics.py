"""Servers' reports on their metrics page."""

import pytest

from agentfactory.rollout.inference.server_metrics import Load, combined, parse_loads, write_load

VLLM_PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100",num_cpu_blocks="None"} 1.0
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.125
vllm:prompt_tokens_total{engine="0",model_name="policy"} 30.0
vllm:prompt_tokens_total{engine="1",model_name="policy"} 40.0
vllm:prompt_tokens_created{engine="1",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 5.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 6.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 8.0
vllm:prefix_cache_hits_total{engine="1",model_name="policy"} 9.0
"""


def test_each_replica_has_its_own_load() -> None:
    loads = [Load(0, 3, 0.25, 30, 5, 8, 100, 16), Load(1, 4, 0.125, 40, 6, 9)]
    assert parse_loads(VLLM_PAGE) == loads
    total = combined(loads)
    assert (total.waiting, total.running, total.cache) == (1, 7, 0.25)
    assert (total.prompt_tokens, total.generation_tokens, total.cached_tokens) == (70, 11, 17)


def test_a_page_is_read_as_it_is_written() -> None:
    load = Load(2, 3, 0.5, 40, 7, 11, 12, 16)
    assert parse_loads(write_load(load)) == [load]
    with pytest.raises(ValueError, match="has no vllm:prompt_tokens_total"):
        parse_loads("vllm:num_requests_running 1\n")
    assert parse_loads(VLLM_PAGE.replace('running{engine="1"', "other{"))[1].running == 0
    with pytest.raises(ValueError, match="has no vllm:num_requests_waiting"):
        parse_loads("")
    with pytest.raises(ValueError, match="has no vllm:generation_tokens_total"):
        parse_loads(VLLM_PAGE.replace('vllm:generation_tokens_total{engine="1"', "other{"))
