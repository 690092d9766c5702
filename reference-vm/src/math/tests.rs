use abi::{CodeBlock, Scalar, Scales};
use half::{bf16, f16};

use super::*;

/// A reproducible stream of values in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype.scalar() {
        Scalar::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Scalar::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Scalar::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        // Any code but NaN.
        Scalar::E4m3 | Scalar::Int8 => values.iter().map(|v| (v * 126.0) as i8 as u8).collect(),
        Scalar::Int4 | Scalar::E2m1 => unreachable!("a row at a time: stored_rows"),
    }
}

/// Rows of `cols` columns. Codes in blocks get codes and scales that the values choose.
fn stored_rows(dtype: DType, values: &[f32], cols: usize) -> Vec<u8> {
    let Some(block) = dtype.block() else { return stored(dtype, values) };
    let row = |values: &[f32]| -> Vec<u8> {
        let mut bytes: Vec<u8> = values
            .iter()
            .cycle()
            .take(dtype.row_bytes(cols))
            .map(|v| (v * 126.0) as i8 as u8)
            .collect();
        for block_bytes in bytes.chunks_exact_mut(block.bytes()) {
            let (_, constants) = block_bytes.split_at_mut(CodeBlock::CODE_BYTES);
            if block.shared() {
                constants.copy_from_slice(&0.3_f32.to_le_bytes());
                continue;
            }
            if block.scales == Scales::Powers {
                constants.iter_mut().zip(120..).for_each(|(constant, power)| *constant = power);
                continue;
            }
            // Factors stay as they are.
            let halves = if block.head_bytes() > 0 { block.head_bytes() } else { constants.len() };
            for (i, constant) in constants[..halves].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let value = if block.scales == Scales::WithZeros && i % 2 == 1 {
                    7.0
                } else {
                    (i + 1) as f32 / 64.0
                };
                *constant = f16::from_f32(value).to_le_bytes();
            }
        }
        bytes
    };
    values.chunks_exact(cols).flat_map(row).collect()
}

const DTYPES: &[DType] = DType::ALL;

#[test]
fn codes_of_8_bits_decode_as_elsewhere() {
    for code in 0..=u8::MAX {
        let decoded = |dtype| {
            let mut out = [0.0];
            ir::decode(dtype, &[code], &mut out);
            out[0].to_bits()
        };
        assert_eq!(StoredInt8::value(code).to_bits(), decoded(DType::Int8), "{code:#04x}");
        if code & 0x7f != 0x7f {
            assert_eq!(StoredE4m3::value(code).to_bits(), decoded(DType::E4m3), "{code:#04x}");
        }
    }
}

#[test]
fn codes_in_blocks_decode_as_elsewhere() {
    for &dtype in DTYPES.iter().filter(|dtype| dtype.block().is_some()) {
        for cols in [1, 33, 64, 128, 300, 1300] {
            // Never the code of NaN.
            let values: Vec<f32> = noise(5, 3 * cols).iter().map(|v| v.abs() * 0.9).collect();
            let bytes = stored_rows(dtype, &values, cols);
            let matrix = Matrix::new(dtype, 3, cols, &bytes).unwrap();
            for (row, stored) in bytes.chunks_exact(dtype.row_bytes(cols)).enumerate() {
                let (mut mine, mut other) = (vec![0.0; cols], vec![0.0; cols]);
                matrix.decode_row(row, 0, &mut mine);
                ir::decode(dtype, stored, &mut other);
                assert_eq!(mine, other, "{dtype:?} {cols}");
                // Of a part of the row too, which ends anywhere.
                for len in [cols, cols.div_ceil(2)] {
                    let x = noise(9, len);
                    let product = matrix.dot_row(row, &x);
                    assert_eq!(
                        product.to_bits(),
                        dot(&mine[..len], &x).to_bits(),
                        "{dtype:?} {len}"
                    );
                }
                assert!(cols == 1 || mine.iter().any(|&value| value != 0.0), "{dtype:?} {cols}");
            }
        }
    }
}

#[test]
fn f16_decodes_every_pattern_as_half_does() {
    for bits in 0..=u16::MAX {
        let want = f16::from_bits(bits).to_f32();
        let got = StoredF16::value(bits.to_le_bytes());
        assert!(
            want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(),
            "{bits:#06x}: {got} for {want}"
        );
    }
}

#[test]
fn products_are_close_to_f64() {
    for &dtype in DTYPES {
        for cols in [1, 31, 32, 33, 64, 577] {
            let bytes = stored_rows(dtype, &noise(7, 5 * cols), cols);
            let x = noise(8, cols);
            let matrix = Matrix::new(dtype, 5, cols, &bytes).unwrap();
            let got = matrix.apply(&x);
            let mut row = vec![0.0; cols];
            for (index, &got) in got.iter().enumerate() {
                matrix.decode_row(index, 0, &mut row);
                let want: f64 =
                    row.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                // Codes are larger than the values of the other types, which are below 1.
                let largest = row.iter().fold(1.0, |most: f64, &w| most.max(f64::from(w).abs()));
                let bound = 1e-5 * largest;
                assert!(
                    (f64::from(got) - want).abs() < bound,
                    "{dtype:?} {cols}: {got} for {want}"
                );
            }
        }
    }
}

#[test]
fn positions_together_have_the_bits_of_positions_alone() {
    for &dtype in DTYPES {
        for (rows, cols, n) in [(3, 5, 2), (70, 96, 7), (300, 1000, 3), (9, 2100, 4)] {
            // One byte off, so that rows are unaligned.
            let mut bytes = vec![0];
            bytes.extend(stored_rows(dtype, &noise(1, rows * cols), cols));
            let matrix = Matrix::new(dtype, rows, cols, &bytes[1..]).unwrap();
            let xs = noise(2, n * cols);
            let together = matrix.apply(&xs);
            let alone: Vec<f32> = xs.chunks_exact(cols).flat_map(|x| matrix.apply(x)).collect();
            assert_eq!(together, alone, "{dtype:?} {rows}x{cols}, {n} positions");
        }
    }
}

#[test]
fn widths_do_not_change_bits() {
    for &dtype in DTYPES {
        for (rows, cols, n) in [(1, 1, 1), (5, 33, 1), (7, 64, 5), (37, 1100, 13), (3, 2080, 6)] {
            let bytes = stored_rows(dtype, &noise(1, rows * cols), cols);
            let matrix = Matrix::new(dtype, rows, cols, &bytes).unwrap();
            let xs = noise(2, n * cols);
            let portable = matrix.apply_with(Width::Portable, &xs);
            for width in Width::all() {
                assert_eq!(matrix.apply_with(width, &xs), portable, "{width:?} {dtype:?} {cols}");
            }
        }
    }
}

#[test]
fn blends_are_chains_whatever_the_width() {
    for (rows, depth, cols) in [(1, 1, 1), (6, 64, 64), (7, 3, 19), (24, 64, 128), (11, 17, 37)] {
        let (a_stride, b_stride, out_stride) = (depth + 1, cols + 2, cols + 3);
        let (a, b) = (noise(5, rows * a_stride), noise(6, depth * b_stride));
        let mut want = vec![0f32; rows * out_stride];
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            want[row * out_stride + col] = (0..depth)
                .fold(0f32, |sum, d| a[row * a_stride + d].mul_add(b[d * b_stride + col], sum));
        }
        for width in Width::all() {
            let mut out = vec![0f32; rows * out_stride];
            let out_of = (&mut out[..], out_stride);
            blend(
                width,
                Blend { a: (&a, a_stride), b: (&b, b_stride), out: out_of, rows, depth, cols },
            );
            assert_eq!(out, want, "{width:?} {rows}x{depth}x{cols}");
        }
    }
}

#[test]
fn exponentials_are_close_whatever_the_width() {
    let scores: Vec<f32> = (0..9000).map(|i| 3.0 - i as f32 * 0.01).collect();
    let run = |width| {
        let mut weights = scores.clone();
        let sum = exp_below(width, &mut weights, 3.0);
        (weights, sum)
    };
    let (weights, sum) = run(Width::Portable);
    for (&weight, &score) in weights.iter().zip(&scores) {
        let want = f64::from(score - 3.0).max(-87.0).exp();
        assert!((f64::from(weight) / want - 1.0).abs() < 3e-7, "exp({score} - 3) is {weight}");
    }
    assert_eq!(weights[0], 1.0);
    assert!((sum / weights.iter().map(|&w| f64::from(w)).sum::<f64>() - 1.0).abs() < 1e-6);
    for width in Width::all() {
        assert_eq!(run(width), (weights.clone(), sum), "{width:?}");
    }
    let mut bad = [f32::NAN, 0.0];
    assert!(exp_below(Width::best(), &mut bad, 0.0).is_nan());
}

#[test]
fn threads_do_not_change_bits() {
    let (rows, cols) = (513, 700);
    let bytes = stored(DType::Bf16, &noise(3, rows * cols));
    let matrix = Matrix::new(DType::Bf16, rows, cols, &bytes).unwrap();
    let xs = noise(4, 3 * cols);
    let with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| matrix.apply(&xs))
    };
    let one = with_threads(1);
    assert_eq!(one, with_threads(2));
    assert_eq!(one, with_threads(5));
}

#[test]
fn a_matrix_must_have_its_bytes() {
    assert!(Matrix::new(DType::F32, 2, 2, &[0; 16]).is_some());
    assert!(Matrix::new(DType::F32, 2, 2, &[0; 15]).is_none());
    assert!(Matrix::new(DType::F32, 0, 2, &[]).is_none());
    assert!(Matrix::new(DType::F32, usize::MAX, 2, &[]).is_none());
    assert!(Matrix::new(DType::F32, 2, 2, &[0; 16]).unwrap().apply(&[]).is_empty());
}

#[test]
fn argmax_takes_the_first_of_equals_and_skips_nan() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    assert_eq!(argmax(&[f32::NAN, -3.0, -2.0]), 2);
    assert_eq!(argmax(&[]), 0);
}

#[test]
fn rotation_keeps_length_and_position_zero_is_identity() {
    let inv_freq = [1.0, 0.25];
    let mut head = [1.0, 2.0, 3.0, 4.0];
    rotate(&mut head, &rotations(0, &inv_freq, 4));
    assert_eq!(head, [1.0, 2.0, 3.0, 4.0]);
    rotate(&mut head, &rotations(5, &inv_freq, 4));
    assert!((head[0].hypot(head[2]) - 10f32.sqrt()).abs() < 1e-6);
    assert!((head[0] - (5f32.cos() - 3.0 * 5f32.sin())).abs() < 1e-6);
}
