//! Valid programs are accepted.

use std::time::Instant;

use ir::program::verify;
use tests::build::{Plan, build};
use tests::toy::{Shape, graph};

const TOY: Shape = Shape {
    hidden: 48,
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    ffn: 56,
    vocab: 100,
    layers: 3,
    tied: false,
    bias: true,
    qk_norm: true,
    window: Some(5),
};

const PLAN: Plan = Plan {
    workers: 4,
    tagged: 0,
    embed_fused: false,
    merge_fused: false,
    splits: 3,
    kv_block: 2,
    block_tiles: 1,
    linear: false,
    rotate: 1,
    kv_capacity: 16,
};

#[test]
fn built_programs_verify() {
    for tagged in [0_u8, 0xff, 0x02, 0x04, 0x55, 0xaa] {
        for bits in 0..8 {
            for workers in [1, 3, 16] {
                let plan = Plan {
                    workers,
                    tagged,
                    embed_fused: bits & 1 == 1,
                    merge_fused: bits & 2 == 2,
                    linear: bits & 4 == 4,
                    ..PLAN
                };
                if let Err(violations) = verify(build(&graph(&TOY), &plan)) {
                    panic!("{plan:?}\n{violations}");
                }
            }
        }
    }
}

#[test]
fn large_programs_verify_quickly() {
    for (layers, workers, heads) in [(1, 20, 16), (3, 64, 64), (16, 132, 64), (80, 132, 64)] {
        for tagged in [0, 0xff] {
            let shape = Shape {
                hidden: 8192,
                heads,
                kv_heads: 8,
                head_dim: 128,
                ffn: 28672,
                vocab: 128_256,
                layers,
                tied: false,
                bias: false,
                qk_norm: false,
                window: None,
            };
            let plan = Plan {
                workers,
                tagged,
                merge_fused: true,
                kv_capacity: 4096,
                splits: 16,
                linear: true,
                ..PLAN
            };
            let program = build(&graph(&shape), &plan);
            let tasks = program.task_len();
            let start = Instant::now();
            if let Err(violations) = verify(program) {
                panic!("{violations}");
            }
            println!("{tasks} tasks, {workers} workers, tagged {tagged:#x}: {:?}", start.elapsed());
        }
    }
}
