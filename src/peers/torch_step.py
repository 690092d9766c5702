"""Times one decode step of a llama-like model in PyTorch, with random weights of the real shapes.

Reads one JSON object with the shapes from standard input; prints one JSON line: either `version`, `us_per_token` (one number per
block) and `conditions`, or `absent` with the reason. A step is everything: embedding, layers, logits, argmax, the token fed back.
Peer `torch-graph` captures the plain step in a CUDA graph; `torch-compile` captures the compiled one. With several GPUs, one process
each: heads, columns of the MLP and rows of the logits are split, and two all-reduces of NCCL a layer add the parts.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
import time

STARTED = time.monotonic()


def answer(**fields):
    print(json.dumps(fields), flush=True)
    sys.exit(0)


def build(torch, ask, device, attention):
    """The model as a module whose `step` takes nothing and returns nothing: all state is in its buffers."""
    functional = torch.nn.functional
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[ask["dtype"]]
    gpus, rank = ask["gpus"], ask.get("rank", 0)
    for split in ("heads", "kv_heads", "ffn", "vocab"):
        if ask[split] % gpus:
            raise ValueError(f"{split} {ask[split]} is no multiple of {gpus} GPUs")
    hidden, heads, kv_heads, dim = ask["hidden"], ask["heads"] // gpus, ask["kv_heads"] // gpus, ask["head_dim"]
    group, ffn, eps, scale = heads // kv_heads, ask["ffn"] // gpus, ask["norm_eps"], ask["attn_scale"]
    vocab, length = ask["vocab"] // gpus, ask["context"] + ask["tokens"]

    def weight(rows, columns):
        made = torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, columns**-0.5)
        return torch.nn.Parameter(made, requires_grad=False)

    def ones(size):
        return torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def norm(x, gain):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) * gain

    def together(x):
        """The sum over all GPUs."""
        if gpus > 1:
            torch.distributed.all_reduce(x)
        return x

    def chosen(logits):
        """The token with the greatest logit of all GPUs."""
        best = logits.max(dim=-1)
        if gpus == 1:
            return best.indices
        mine = torch.stack((best.values.double(), (best.indices + rank * vocab).double()))
        each = mine.new_empty(2 * gpus, 1)
        torch.distributed.all_gather_into_tensor(each, mine)
        return each[1::2].gather(0, each[::2].argmax(0, keepdim=True))[0].long()

    def rotate(x, cos, sin):
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(dtype)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_norm, self.mlp_norm = ones(hidden), ones(hidden)
            self.qkv = weight((heads + 2 * kv_heads) * dim, hidden)
            self.qkv_bias = ones((heads + 2 * kv_heads) * dim) if ask["attention_bias"] else None
            self.o = weight(hidden, heads * dim)
            self.gate_up, self.down = weight(2 * ffn, hidden), weight(hidden, ffn)
            self.q_norm, self.k_norm = (ones(dim), ones(dim)) if ask["qk_norm"] else (None, None)
            cache = torch.zeros(kv_heads, length, dim, dtype=dtype, device=device)
            self.register_buffer("keys", cache.clone().normal_())
            self.register_buffer("values", cache.clone().normal_())

        def attend(self, x, position, cos, sin, mask):
            qkv = functional.linear(norm(x, self.attn_norm), self.qkv, self.qkv_bias)
            q, k, v = qkv.view(-1, dim).split((heads, kv_heads, kv_heads))
            if self.q_norm is not None:
                q, k = norm(q, self.q_norm), norm(k, self.k_norm)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self.keys[:, position] = k.view(kv_heads, 1, dim)
            self.values[:, position] = v.view(kv_heads, 1, dim)
            if attention == "sdpa":
                out = functional.scaled_dot_product_attention(
                    q.view(1, heads, 1, dim), self.keys[None], self.values[None],
                    attn_mask=mask, scale=scale, enable_gqa=group > 1,
                )
            else:
                # Puts the query heads of a group side by side: the cache is read once and never repeated.
                scores = torch.matmul(q.view(kv_heads, group, dim), self.keys.transpose(1, 2))
                scores = (scores.float() * scale).masked_fill(~mask, float("-inf"))
                out = torch.matmul(torch.softmax(scores, dim=-1).to(dtype), self.values)
            return x + together(functional.linear(out.reshape(1, heads * dim), self.o))

        def forward(self, x, position, cos, sin, mask):
            x = self.attend(x, position, cos, sin, mask)
            gate, up = functional.linear(norm(x, self.mlp_norm), self.gate_up).chunk(2, dim=-1)
            return x + together(functional.linear(functional.silu(gate) * up, self.down))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = weight(ask["vocab"], hidden)
            # A part of a tied matrix is a view of it.
            self.head = self.embed[rank * vocab:(rank + 1) * vocab] if ask["tied"] else weight(vocab, hidden)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(ask["layers"]))
            self.final_norm = ones(hidden)
            inv_freq = torch.tensor(ask["inv_freq"], dtype=torch.float32, device=device)
            angles = torch.arange(length, device=device).float()[:, None] * inv_freq[None]
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
            self.register_buffer("places", torch.arange(length, device=device))
            self.register_buffer("token", torch.zeros(1, dtype=torch.long, device=device))
            self.register_buffer("position", torch.full((1,), ask["context"], device=device))

        def forward(self):
            x = self.embed[self.token]
            cos, sin = self.cos[self.position], self.sin[self.position]
            mask = (self.places <= self.position).view(1, 1, length)
            if attention == "sdpa":
                mask = mask[None]
            for layer in self.layers:
                x = layer(x, self.position, cos, sin, mask)
            logits = functional.linear(norm(x, self.final_norm), self.head)
            self.token.copy_(chosen(logits))
            self.position.add_(1)

    return Model().eval()


def captured(torch, model, step):
    """The step as a CUDA graph, warmed up on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, on a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def blocks(torch, ask, model, step):
    """Microseconds per token of each block. Every block decodes the same positions: the cache holds the true context."""
    wait = torch.cuda.synchronize if ask["device"] == "cuda" else lambda: None
    times = []
    for _ in range(ask["warmup"] + ask["blocks"]):
        model.position.fill_(ask["context"])
        wait()
        start = time.perf_counter()
        for _ in range(ask["tokens"]):
            step()
        wait()
        times.append((time.perf_counter() - start) / ask["tokens"] * 1e6)
    if int(model.position) != ask["context"] + ask["tokens"]:
        raise RuntimeError("the steps did not count their positions")
    return times[ask["warmup"]:]


def measure(torch, ask, attention):
    """Blocks of one variant, and what was run."""
    compiled = ask["peer"] == "torch-compile"
    model = build(torch, ask, ask["device"], attention)
    step, mode = model, "plain step"
    if compiled:
        mode = "max-autotune-no-cudagraphs" if ask["device"] == "cuda" else "default"
        step = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
        mode = f"torch.compile {mode}"
    # Warm-up steps of a capture write past the context; they stay within the cache.
    model.position.zero_()
    if ask["device"] == "cuda":
        step, mode = captured(torch, model, step), f"{mode}, CUDA graph"
    else:
        step()
    return blocks(torch, ask, model, step), f"{mode}, {attention} attention"


def joined(torch, ask):
    """Starts a process for each further GPU, or joins the group as one of them. Returns those that were started."""
    started = []
    if ask["gpus"] == 1:
        return started
    if ask["peer"] == "torch-compile":
        answer(absent="torch-compile is measured on one GPU only")
    cuda = ask["device"] == "cuda"
    if cuda and torch.cuda.device_count() < ask["gpus"]:
        answer(absent=f"torch finds {torch.cuda.device_count()} of {ask['gpus']} GPUs")
    if "rank" not in ask:
        ask |= {"rank": 0, "meeting": tempfile.mktemp(prefix="amk-nccl-")}
        for rank in range(1, ask["gpus"]):
            # The script is the text behind -c. It is killed when this process ends (PR_SET_PDEATHSIG): a collective waits forever.
            end = {"preexec_fn": lambda: ctypes.CDLL(None).prctl(1, 9), "stdout": subprocess.DEVNULL}
            other = subprocess.Popen(sys.orig_argv[:3], stdin=subprocess.PIPE, text=True, **end)
            other.stdin.write(json.dumps(ask | {"rank": rank}))
            other.stdin.close()
            started.append(other)
    if cuda:
        torch.cuda.set_device(ask["rank"])
    backend = "nccl" if cuda else "gloo"
    where = f"file://{ask['meeting']}"
    torch.distributed.init_process_group(backend, init_method=where, rank=ask["rank"], world_size=ask["gpus"])
    return started


def main():
    ask = json.load(sys.stdin)
    try:
        import torch
    except ImportError as error:
        answer(absent=f"{sys.executable} cannot import torch ({error}); pip install torch")
    if ask["device"] == "cuda" and not torch.cuda.is_available():
        answer(absent=f"torch {torch.__version__} finds no CUDA device")
    torch.manual_seed(0)
    others = joined(torch, ask)
    found, failed = [], []
    for attention in ("grouped", "sdpa"):
        # Runs a second variant only if the first left enough time for it; with several GPUs all must run the same.
        if found and ask["gpus"] == 1 and (time.monotonic() - STARTED) > 0.4 * ask["seconds"]:
            break
        try:
            with torch.no_grad():
                found.append(measure(torch, ask, attention))
        except Exception as error:  # the reason is the answer
            failed.append(f"{attention} attention: {type(error).__name__}: {error}".split("\n")[0][:300])
        if ask["device"] == "cuda":
            torch.cuda.empty_cache()
    if ask["gpus"] > 1:
        torch.distributed.destroy_process_group()
    for other in others:
        other.wait()
    if not found:
        answer(absent="; ".join(failed))
    times, what = min(found, key=lambda variant: sorted(variant[0])[len(variant[0]) // 2])
    device = torch.cuda.get_device_name() if ask["device"] == "cuda" else "cpu"
    tried = f"the faster of {len(found)} variants" if len(found) > 1 else "one variant"
    conditions = [what, tried, ask["dtype"], device, f"CUDA {torch.version.cuda}"]
    if ask["gpus"] > 1 and ask["device"] == "cuda":
        conditions.append(f"{ask['gpus']} GPUs, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    answer(version=torch.__version__, us_per_token=times, conditions=conditions + failed)


if __name__ == "__main__":
    main()
