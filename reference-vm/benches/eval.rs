//! How long one position and a prompt of 48 take on the shape of smollm2-135m, and one 4096 x 4096 product on one thread.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use ir::{DType, Graph, Layer, Linear, Tensor, TensorId, Weights};
use reference_vm::eval::{Evaluator, Logits};

/// Weights that are all views of one random block: only shapes matter here.
struct Block {
    bytes: Vec<u8>,
    lens: Vec<usize>,
}

impl Weights for Block {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        &self.bytes[..self.lens[tensor.index()]]
    }
}

/// Hidden, heads, kv_heads, head_dim, ffn, vocab, layers.
type Shape = [u32; 7];

const SMOLLM2_135M: Shape = [576, 9, 3, 64, 1536, 49152, 30];
const ONE_PRODUCT: Shape = [4096, 1, 1, 64, 64, 4096, 0];

fn graph(
    [hidden, heads, kv_heads, head_dim, ffn, vocab, layers]: Shape,
    dtype: DType,
) -> (Graph, Block) {
    let mut tensors = Vec::new();
    let mut tensor = |shape: &[u32]| {
        tensors.push(Tensor { name: String::new(), dtype, shape: shape.to_vec() });
        TensorId(tensors.len() as u32 - 1)
    };
    let embed = tensor(&[vocab, hidden]);
    let final_norm = tensor(&[hidden]);
    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let mut layer = || {
        let mut linear = |rows, cols| Linear { weight: tensor(&[rows, cols]), bias: None };
        let (q, k, v) =
            (linear(q_width, hidden), linear(kv_width, hidden), linear(kv_width, hidden));
        let (o, gate, up) = (linear(hidden, q_width), linear(ffn, hidden), linear(ffn, hidden));
        let down = linear(hidden, ffn);
        let (attn_norm, mlp_norm) = (tensor(&[hidden]), tensor(&[hidden]));
        Layer {
            attn_norm,
            q,
            k,
            v,
            q_norm: None,
            k_norm: None,
            o,
            mlp_norm,
            gate,
            up,
            down,
            window: None,
        }
    };
    let layers = (0..layers).map(|_| layer()).collect();
    let lens: Vec<usize> = tensors.iter().map(Tensor::bytes).collect();
    // Exponents of 0x3c: values around 0.01.
    let bytes = (0..lens.iter().copied().max().unwrap_or(0))
        .map(|i| if i % 2 == 1 { 0x3c } else { (i * 7) as u8 });
    let block = Block { bytes: bytes.collect(), lens };
    let graph = Graph {
        name: "bench".into(),
        family: "llama".into(),
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        norm_eps: 1e-5,
        inv_freq: (0..head_dim / 2)
            .map(|i| 10000f32.powf(-2.0 * i as f32 / head_dim as f32))
            .collect(),
        attn_scale: (head_dim as f32).powf(-0.5),
        max_positions: 2048,
        dtype,
        tensors,
        embed,
        layers,
        final_norm,
        lm_head: embed,
        eos: vec![],
        bos: None,
    };
    (graph, block)
}

fn bench(c: &mut Criterion) {
    let (one_product, weights) = graph(ONE_PRODUCT, DType::Bf16);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for dtype in [DType::Bf16, DType::F16] {
        let mut one_product = one_product.clone();
        one_product.tensors.iter_mut().for_each(|tensor| tensor.dtype = dtype);
        let mut evaluator = Evaluator::new(&one_product, &weights).unwrap();
        c.bench_function(&format!("4096 x 4096 {}, one thread", dtype.name()), |b| {
            pool.install(|| {
                b.iter(|| {
                    evaluator.reset();
                    black_box(evaluator.run(black_box(&[1]), Logits::Last).unwrap())
                });
            });
        });
    }

    let (smollm2, weights) = graph(SMOLLM2_135M, DType::Bf16);
    let mut evaluator = Evaluator::new(&smollm2, &weights).unwrap();
    for prompt in [1, 48] {
        let tokens: Vec<u32> = (0..prompt).collect();
        c.bench_function(&format!("smollm2-135m, {prompt} positions"), |b| {
            b.iter(|| {
                evaluator.reset();
                black_box(evaluator.run(black_box(&tokens), Logits::All).unwrap())
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = bench
}
criterion_main!(benches);
