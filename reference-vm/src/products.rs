//! A cache of dot products, for machines that run many programs of one model.
//!
//! A schedule decides which task multiplies which rows, when, and from which buffer it reads the vector. It does not
//! affect the product of a stored row and a given vector. Only that number is cached here, under the stored row and all
//! bits of the vector; everything that a schedule decides is still executed. A task with a wrong row looks up another
//! number, and one with a wrong vector finds none, so the cache never hides an error.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use ir::{DType, Weights};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::math::{Matrix, TASK_MACS};

/// Marks a missing product: a signalling NaN, which no arithmetic gives.
const ABSENT: u32 = 0x7fa5_5a5a;

/// The cached products of one set of weights, up to a memory limit.
pub struct Products<'w> {
    weights: &'w dyn Weights,
    bytes_max: usize,
    generation: AtomicU64,
    kept: RwLock<Kept>,
    /// Threads that multiply whole matrices; they run no machine.
    crew: Option<ThreadPool>,
}

#[derive(Default)]
struct Kept {
    /// By matrix and by a hash of the vector; the vector itself is compared as well.
    rows: BTreeMap<(Stored, u64), Vec<Arc<Rows>>>,
    bytes: usize,
}

/// A stored matrix: the address of its bytes, which is stable as long as the weights live, and their format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stored {
    pub(crate) address: usize,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// The cached products of one stored matrix with one vector.
pub(crate) struct Rows {
    vector: Arc<[u32]>,
    products: Vec<AtomicU32>,
    used: AtomicU64,
    /// A thread has already requested the product of the whole matrix from the pool.
    claimed: AtomicBool,
}

impl Rows {
    /// The product of row `row`, computed on first use. Two threads that both compute it store the same bits.
    pub(crate) fn get(&self, row: usize, compute: impl FnOnce() -> f32) -> f32 {
        let found = self.products[row].load(Ordering::Relaxed);
        if found != ABSENT {
            return f32::from_bits(found);
        }
        let product = compute();
        self.products[row].store(product.to_bits(), Ordering::Relaxed);
        product
    }

    /// Computes the missing products on all threads of the pool. A program takes rows one task after another on few
    /// threads, fewer than the memory bandwidth supports. No thread waits for this: a row that is needed earlier is
    /// computed by its reader.
    fn fill(&self, matrix: &Matrix<'_>, x: &[f32], crew: &ThreadPool) {
        if self.claimed.swap(true, Ordering::Relaxed) {
            return;
        }
        let rows = (TASK_MACS / x.len().max(1)).max(1);
        let chunk = |(index, products): (usize, &[AtomicU32])| {
            if products.iter().all(|product| product.load(Ordering::Relaxed) != ABSENT) {
                return;
            }
            let mut out = vec![0.0; products.len()];
            matrix.dot_rows(index * rows, x, &mut out);
            for (product, out) in products.iter().zip(out) {
                product.store(out.to_bits(), Ordering::Relaxed);
            }
        };
        crew.install(|| self.products.par_chunks(rows).enumerate().for_each(chunk));
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.vector) + self.products.len() * size_of::<AtomicU32>()
    }
}

/// A vector with its hash, computed once for all matrices that it is multiplied with.
pub(crate) struct Vector {
    bits: Arc<[u32]>,
    hash: u64,
}

impl Vector {
    pub(crate) fn new(values: &[f32]) -> Self {
        let bits: Arc<[u32]> = values.iter().map(|value| value.to_bits()).collect();
        // Multiply and rotate, in independent lanes. Any hash will do.
        let mix = |hash: u64, word: u32| {
            (hash.rotate_left(5) ^ u64::from(word)).wrapping_mul(0x517c_c1b7_2722_0a95)
        };
        let mut lanes = [bits.len() as u64; 8];
        let (chunks, rest) = bits.as_chunks::<8>();
        for chunk in chunks {
            for (lane, &word) in lanes.iter_mut().zip(chunk) {
                *lane = mix(*lane, word);
            }
        }
        let hash = rest.iter().fold(0, |hash, &word| mix(hash, word));
        let join = |hash: u64, lane: u64| mix(mix(hash, lane as u32), (lane >> 32) as u32);
        Self { hash: lanes.into_iter().fold(hash, join), bits }
    }
}

impl<'w> Products<'w> {
    /// An empty cache of at most `bytes_max` bytes.
    #[must_use]
    pub fn new(weights: &'w dyn Weights, bytes_max: usize) -> Self {
        Self {
            weights,
            bytes_max,
            generation: AtomicU64::new(0),
            kept: RwLock::new(Kept::default()),
            crew: None,
        }
    }

    /// Multiplies the whole of a matrix on this many threads when its first product with a vector is requested. If the
    /// system cannot start threads, products are computed one by one.
    #[must_use]
    pub fn with_crew(self, threads: usize) -> Self {
        let crew = ThreadPoolBuilder::new().num_threads(threads).build().ok();
        Self { crew, ..self }
    }

    /// The weights of these products.
    #[must_use]
    pub fn weights(&self) -> &'w dyn Weights {
        self.weights
    }

    /// Bytes in use.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.kept.read().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// Begins a new program: entries that the last one did not use may be evicted when space is needed.
    pub(crate) fn begin(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Computes the missing products of `matrix` with `x` on the thread pool, if there is one.
    pub(crate) fn fill(&self, rows: &Rows, matrix: &Matrix<'_>, x: &[f32]) {
        if let Some(crew) = &self.crew {
            rows.fill(matrix, x, crew);
        }
    }

    /// The products of a stored matrix with a vector; `None` if there is no room for them.
    pub(crate) fn of(&self, matrix: Stored, vector: &Vector) -> Option<Arc<Rows>> {
        let generation = self.generation.load(Ordering::Relaxed);
        let key = (matrix, vector.hash);
        let found = |kept: &Kept| {
            let twins = kept.rows.get(&key)?;
            twins.iter().find(|rows| rows.vector == vector.bits).cloned()
        };
        let known = found(&self.kept.read().unwrap_or_else(PoisonError::into_inner));
        if let Some(rows) = known {
            rows.used.store(generation, Ordering::Relaxed);
            return Some(rows);
        }
        let rows = Arc::new(Rows {
            vector: vector.bits.clone(),
            products: (0..matrix.rows).map(|_| AtomicU32::new(ABSENT)).collect(),
            used: AtomicU64::new(generation),
            claimed: AtomicBool::new(false),
        });
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = found(&kept) {
            return Some(rows);
        }
        if kept.bytes + rows.bytes() > self.bytes_max {
            kept.forget(generation, self.bytes_max / 2);
        }
        if kept.bytes + rows.bytes() > self.bytes_max {
            return None;
        }
        kept.bytes += rows.bytes();
        kept.rows.entry(key).or_default().push(rows.clone());
        Some(rows)
    }
}

impl Kept {
    /// Evicts the least recently used entries until at most `bytes` are left, or all that remain were used since
    /// `generation`.
    fn forget(&mut self, generation: u64, bytes: usize) {
        let used = |rows: &Arc<Rows>| rows.used.load(Ordering::Relaxed);
        let mut by_use: BTreeMap<u64, usize> = BTreeMap::new();
        for rows in self.rows.values().flatten() {
            *by_use.entry(used(rows)).or_default() += rows.bytes();
        }
        let mut left = self.bytes;
        let mut oldest_kept = 0;
        for (&at, &size) in by_use.range(..generation) {
            if left <= bytes {
                break;
            }
            left -= size;
            oldest_kept = at + 1;
        }
        for twins in self.rows.values_mut() {
            twins.retain(|rows| used(rows) >= oldest_kept);
        }
        self.rows.retain(|_, twins| !twins.is_empty());
        self.bytes = self.rows.values().flatten().map(|rows| rows.bytes()).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Weights for Nothing {
        fn bytes(&self, _: ir::TensorId) -> &[u8] {
            &[]
        }
    }

    const MATRIX: Stored = Stored { address: 64, dtype: DType::F32, rows: 4, cols: 8 };

    #[test]
    fn a_product_is_computed_once_and_only_for_its_own_vector() {
        let products = Products::new(&Nothing, 1 << 20);
        let (a, b) = (Vector::new(&[1.0; 8]), Vector::new(&[1.0, -0.0]));
        let rows = products.of(MATRIX, &a).unwrap();
        assert_eq!(rows.get(2, || 5.0), 5.0);
        assert_eq!(products.of(MATRIX, &a).unwrap().get(2, || unreachable!()), 5.0);
        assert_eq!(products.of(MATRIX, &a).unwrap().get(1, || 6.0), 6.0);
        assert_eq!(products.of(MATRIX, &b).unwrap().get(2, || 7.0), 7.0);
        // Equal as numbers, not as bits.
        let c = Vector::new(&[1.0, 0.0]);
        assert_eq!(products.of(MATRIX, &c).unwrap().get(2, || 8.0), 8.0);
    }

    #[test]
    fn a_hash_that_two_vectors_share_does_not_mix_them_up() {
        let products = Products::new(&Nothing, 1 << 20);
        let (a, b) = (Vector::new(&[1.0; 8]), Vector::new(&[2.0; 8]));
        let twin = Vector { bits: b.bits.clone(), hash: a.hash };
        assert_eq!(products.of(MATRIX, &a).unwrap().get(0, || 1.0), 1.0);
        assert_eq!(products.of(MATRIX, &twin).unwrap().get(0, || 2.0), 2.0);
        assert_eq!(products.of(MATRIX, &a).unwrap().get(0, || unreachable!()), 1.0);
    }

    #[test]
    fn memory_is_bounded_and_old_programs_make_room() {
        let one = 8 * 4 + 4 * 4;
        let products = Products::new(&Nothing, 2 * one);
        let vector = |i: u32| Vector::new(&[i as f32; 8]);
        products.begin();
        assert!(products.of(MATRIX, &vector(0)).is_some());
        assert!(products.of(MATRIX, &vector(1)).is_some());
        assert!(products.of(MATRIX, &vector(2)).is_none(), "no room in one program");
        assert_eq!(products.bytes(), 2 * one);
        products.begin();
        assert!(products.of(MATRIX, &vector(1)).is_some());
        assert!(products.of(MATRIX, &vector(2)).is_some(), "the unused one made room");
        assert_eq!(products.bytes(), 2 * one);
        let rows = products.of(MATRIX, &vector(1)).unwrap();
        assert_eq!(rows.get(0, || 9.0), 9.0);
    }

    #[test]
    fn room_is_made_by_those_that_were_not_used_for_longest() {
        let one = 8 * 4 + 4 * 4;
        let products = Products::new(&Nothing, 4 * one);
        let vector = |i: u32| Vector::new(&[i as f32; 8]);
        for i in 0..4 {
            products.begin();
            assert!(products.of(MATRIX, &vector(i)).is_some());
        }
        products.begin();
        let first = products.of(MATRIX, &vector(0)).unwrap();
        assert_eq!(first.get(0, || 3.0), 3.0);
        products.begin();
        assert!(products.of(MATRIX, &vector(4)).is_some());
        // The first and the fourth of the four are left, and the new one.
        assert_eq!(products.bytes(), 3 * one);
        assert_eq!(products.of(MATRIX, &vector(0)).unwrap().get(0, || unreachable!()), 3.0);
    }

    #[test]
    fn a_crew_gives_the_bits_that_single_rows_give() {
        let bytes: Vec<u8> = (0..4000 * 64 * 2).map(|i: u32| (i * 37 % 251) as u8 & 0x3f).collect();
        let matrix = Matrix::new(DType::Bf16, 4000, 64, &bytes).unwrap();
        let place = Stored { address: 64, dtype: DType::Bf16, rows: 4000, cols: 64 };
        let x: Vec<f32> = (0..64).map(|i| (i as f32 - 31.5) / 7.0).collect();
        let products = Products::new(&Nothing, 1 << 20).with_crew(2);
        let rows = products.of(place, &Vector::new(&x)).unwrap();
        assert_eq!(rows.get(17, || 5.0), 5.0);
        products.fill(&rows, &matrix, &x);
        for row in 0..4000 {
            let product = rows.get(row, || unreachable!());
            assert_eq!(product.to_bits(), matrix.dot_row(row, &x).to_bits(), "row {row}");
        }
    }
}
