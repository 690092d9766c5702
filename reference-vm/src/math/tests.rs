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
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

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
    for dtype in DTYPES {
        for cols in [1, 31, 32, 33, 64, 577] {
            let bytes = stored(dtype, &noise(7, 5 * cols));
            let x = noise(8, cols);
            let matrix = Matrix::new(dtype, 5, cols, &bytes).unwrap();
            let got = matrix.apply(&x);
            let mut row = vec![0.0; cols];
            for (index, &got) in got.iter().enumerate() {
                matrix.decode_row(index, 0, &mut row);
                let want: f64 =
                    row.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                assert!((f64::from(got) - want).abs() < 1e-5, "{dtype:?} {cols}: {got} for {want}");
            }
        }
    }
}

#[test]
fn positions_together_have_the_bits_of_positions_alone() {
    for dtype in DTYPES {
        for (rows, cols, n) in [(3, 5, 2), (70, 96, 7), (300, 1000, 3)] {
            // One byte off, so that rows are unaligned.
            let mut bytes = vec![0];
            bytes.extend(stored(dtype, &noise(1, rows * cols)));
            let matrix = Matrix::new(dtype, rows, cols, &bytes[1..]).unwrap();
            let xs = noise(2, n * cols);
            let together = matrix.apply(&xs);
            let alone: Vec<f32> = xs.chunks_exact(cols).flat_map(|x| matrix.apply(x)).collect();
            assert_eq!(together, alone, "{dtype:?} {rows}x{cols}, {n} positions");
        }
    }
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
    rotate(&mut head, &rotations(0, &inv_freq));
    assert_eq!(head, [1.0, 2.0, 3.0, 4.0]);
    rotate(&mut head, &rotations(5, &inv_freq));
    assert!((head[0].hypot(head[2]) - 10f32.sqrt()).abs() < 1e-6);
    assert!((head[0] - (5f32.cos() - 3.0 * 5f32.sin())).abs() < 1e-6);
}
