//! Decodes keys and values from the layout of the caches.

use abi::KV_PAGE;
use ir::KvDtype;

use super::HALF_BYTES;
use crate::pages::PageLayout;

/// Extracts the keys and values of `positions` positions from the bytes of a session's pages in a layer. Returns
/// `[positions][kv_heads * head_dim]` each.
pub(crate) fn unpacked(bytes: &[u8], layout: PageLayout, positions: u32) -> (Vec<f32>, Vec<f32>) {
    let PageLayout { kv_heads, head_dim, dtype } = layout;
    let row_bytes = layout.row_bytes();
    let rows = |first_run: u32| {
        let mut out = Vec::with_capacity((positions * kv_heads * head_dim) as usize);
        for position in 0..positions {
            let page = u64::from(position / KV_PAGE) * layout.page_bytes();
            for run in first_run..first_run + kv_heads {
                let row = run * layout.head_bytes() + position % KV_PAGE * row_bytes;
                let at = (page + u64::from(row)) as usize;
                let row = &bytes[at..at + row_bytes as usize];
                let element = |e: u32| match dtype {
                    KvDtype::F16 => half_at(row, half_place(position, head_dim, e)),
                    // The scale is behind the codes.
                    KvDtype::E4m3 => ir::e4m3(row[e as usize]) * half_at(row, head_dim as usize),
                };
                out.extend((0..head_dim).map(element));
            }
        }
        out
    };
    (rows(0), rows(kv_heads))
}

fn half_at(row: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([row[at], row[at + 1]]).to_f32()
}

/// Place of an element in a row of f16, whose 16-byte chunks are permuted by its position.
fn half_place(position: u32, head_dim: u32, element: u32) -> usize {
    let chunk = (element / 8) ^ row_swizzle(position, head_dim);
    (chunk * 16 + element % 8 * 2) as usize
}

/// XOR mask of a row's chunks, as `row_swizzle` of keys.cuh.
pub(crate) fn row_swizzle(position: u32, head_dim: u32) -> u32 {
    let chunks = head_dim * HALF_BYTES / 16;
    let swizzled = 1 << chunks.trailing_zeros(); // permuted among themselves
    if swizzled < 8 {
        return position / (8 / swizzled) % swizzled;
    }
    (position & 1) << 2 | (position & 6) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_cache_are_found_again() {
        for head_dim in [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256] {
            let (kv_heads, positions) = (2_u32, 2 * KV_PAGE + 19);
            let (chunks, layout) =
                (head_dim / 8, PageLayout::new(kv_heads, head_dim, KvDtype::F16));
            let mut bytes = vec![0xff; 3 * layout.page_bytes() as usize];
            let value = |run: u32, position: u32, e: u32| {
                (run * 500 % 1500 + position % 24 * 20 + e % 20) as f32
            };
            for (run, position) in
                (0..2 * kv_heads).flat_map(|r| (0..positions).map(move |p| (r, p)))
            {
                let mut taken = vec![false; chunks as usize];
                for e in 0..head_dim {
                    let chunk = (e / 8) ^ row_swizzle(position, head_dim);
                    taken[chunk as usize] = true;
                    let (page, row) = (position / 128, run * 128 + position % 128);
                    let row = page * 2 * kv_heads * 128 + row;
                    let at = (row * head_dim * 2 + chunk * 16 + e % 8 * 2) as usize;
                    let half = half::f16::from_f32(value(run, position, e));
                    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
                assert!(taken.iter().all(|&t| t), "a permutation of {chunks} chunks");
            }
            let (keys, values) = unpacked(&bytes, layout, positions);
            for (index, (k, v)) in keys.iter().zip(&values).enumerate() {
                let (index, width) = (index as u32, kv_heads * head_dim);
                let (position, head, e) =
                    (index / width, index % width / head_dim, index % head_dim);
                assert_eq!(*k, value(head, position, e), "{head_dim}: {index}");
                assert_eq!(*v, value(kv_heads + head, position, e), "{head_dim}: {index}");
            }
        }
    }

    #[test]
    fn codes_are_multiplied_by_the_scale_behind_them() {
        let layout = PageLayout::new(2, 64, KvDtype::E4m3);
        assert_eq!((layout.row_bytes(), layout.page_bytes()), (80, 2 * 2 * 128 * 80));
        let mut bytes = vec![0; 2 * layout.page_bytes() as usize];
        // The value of the second head at position 130, in the second page.
        let at = layout.page_bytes() as usize + (3 * 128 + 2) * 80;
        bytes[at + 5] = 0xc4; // -(1 + 4/8) * 2
        bytes[at + 64..at + 66].copy_from_slice(&half::f16::from_f32(0.25).to_le_bytes());
        let (keys, values) = unpacked(&bytes, layout, 131);
        assert!(keys.iter().all(|&key| key == 0.0));
        let found = values.iter().position(|&value| value != 0.0);
        assert_eq!(found, Some((130 * 2 + 1) * 64 + 5));
        assert_eq!(values[found.unwrap_or(0)], -0.75);
    }
}
