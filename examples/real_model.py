"""A real model through the cache (`kvpool[demo]`): its first token, cold, and when most of a prompt is there."""

from time import perf_counter

from transformers import AutoTokenizer

from kvpool import KVCacheManager
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.scheduler import Scheduler
from kvpool.runner.opening import Opening
from kvpool.runner.startup import CacheSettings

worker, opened = Opening("demo", num_threads=1, settings=CacheSettings(kv_bytes=2**28, max_model_len=2048))()
cache = KVCacheManager.from_plan(opened.start.plan)
scheduler = Scheduler(cache)
engine = Engine(scheduler, ModelRunner(scheduler, worker))
tokenizer = AutoTokenizer.from_pretrained(opened.folder)
print(f"{opened.name}: {cache.num_usable_blocks} blocks of {cache.block_size} tokens")

facts = "Ports of our ferry: " + "".join(f"stop {stop} is left at {stop % 12}:{stop % 60:02}. " for stop in range(76))
seconds = []
for question in ("When is stop 31 left? Answer in a few words.", "Which stop comes after stop 7? Answer shortly."):
    turns = [{"role": "system", "content": facts}, {"role": "user", "content": question}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    request = Generation(question, prompt, stop_token_ids=opened.eos_token_ids, max_tokens=16)
    num_cached = cache.match(request).num_tokens
    scheduler.add(request)
    started_s = perf_counter()
    engine.step()  # the whole prompt, and the first token
    seconds.append(perf_counter() - started_s)
    while scheduler.has_work:
        engine.step()
    answer = tokenizer.decode(request.token_ids[len(prompt) :], skip_special_tokens=True)
    print(f"{num_cached:5} of {len(prompt):,} tokens cached, first token in {seconds[-1]:.2f} s: {answer}")
print(f"{seconds[0] / seconds[1]:.0f} times sooner")
