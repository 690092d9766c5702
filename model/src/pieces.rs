//! Tensors of a graph that are not stored as they are: rows of a fused matrix, rows in another order, norms with a term
//! or factor.

use ir::{DType, Linear, Tensor, TensorId, decode};

/// How a tensor is made of a stored one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    /// The stored tensor's name.
    pub(crate) name: String,
    /// Its first row of the piece, and its rows.
    pub(crate) first: u32,
    pub(crate) of: u32,
    pub(crate) change: Change,
}

/// What is done to the rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    None,
    /// Each head's rows are put in another order.
    Order(HeadOrder),
    /// Every element becomes `(element + add) * times`, in f32.
    Affine {
        add: f32,
        times: f32,
    },
    /// Elements are picked from the whole tensor.
    Strided(Strided),
}

/// Where the elements of a matrix or vector lie in a stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Strided {
    /// Shape of the stored tensor.
    pub(crate) shape: Vec<u32>,
    /// Index of the first element, and what a row and a column add to it.
    pub(crate) first: u64,
    pub(crate) row: u64,
    pub(crate) col: u64,
}

/// The stored row of a head for each of its rows, such that element `i` is rotated with element `i + n / 2` of `n`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HeadOrder(Vec<u32>);

impl HeadOrder {
    /// `None` if heads are stored in this order. The first `rotated` elements of a stored head are rotated.
    pub(crate) fn new(head_dim: u32, rotated: u32, neighbours: bool) -> Option<Self> {
        let (half, pairs) = (head_dim / 2, rotated.min(head_dim) / 2);
        let source = |i: u32| {
            let (pair, upper) = (i % half.max(1), i / half.max(1));
            match (pair < pairs, neighbours) {
                (true, true) => 2 * pair + upper,
                (true, false) => pair + upper * pairs,
                (false, _) => 2 * pairs + upper * (half - pairs) + pair - pairs,
            }
        };
        let order: Vec<u32> = (0..head_dim).map(source).collect();
        (!order.iter().copied().eq(0..head_dim)).then_some(Self(order))
    }

    /// Where a row of a matrix of heads is stored.
    pub(crate) fn source(&self, row: usize) -> usize {
        let heads = row / self.0.len();
        heads * self.0.len() + self.0[row % self.0.len()] as usize
    }

    /// Puts rows of `row` bytes in order.
    fn apply(&self, stored: &[u8], row: usize) -> Vec<u8> {
        let heads = stored.chunks_exact(self.0.len() * row);
        let rows = heads.flat_map(|head| self.0.iter().map(|&i| &head[i as usize * row..][..row]));
        rows.flatten().copied().collect()
    }
}

impl Strided {
    fn apply(&self, tensor: &Tensor, dtype: DType, stored: &[u8]) -> Vec<u8> {
        let (rows, cols) = (tensor.shape[0], tensor.shape.get(1).copied().unwrap_or(1));
        let size = dtype.bytes();
        let mut out = Vec::with_capacity(tensor.len() * size);
        for row in 0..u64::from(rows) {
            let first = self.first + row * self.row;
            let places = (0..u64::from(cols)).map(|col| (first + col * self.col) as usize * size);
            places.for_each(|at| out.extend_from_slice(&stored[at..at + size]));
        }
        out
    }
}

impl Piece {
    /// The shape of the stored tensor that a tensor is a piece of.
    pub(crate) fn stored_shape(&self, tensor: &Tensor) -> Vec<u32> {
        if let Change::Strided(strided) = &self.change {
            return strided.shape.clone();
        }
        let mut shape = tensor.shape.clone();
        shape[0] = self.of;
        shape
    }
}

impl Change {
    /// The bytes of a tensor of this type from those that are stored.
    pub(crate) fn apply(&self, tensor: &Tensor, dtype: DType, stored: &[u8]) -> Vec<u8> {
        match self {
            Self::None => stored.to_vec(),
            Self::Strided(strided) => strided.apply(tensor, dtype, stored),
            Self::Order(order) => {
                let elements: u32 = tensor.shape[1..].iter().product();
                order.apply(stored, elements as usize * dtype.bytes())
            }
            Self::Affine { add, times } => {
                let mut values = vec![0.0; tensor.len()];
                decode(dtype, stored, &mut values);
                values.iter().flat_map(|value| ((value + add) * times).to_le_bytes()).collect()
            }
        }
    }

    /// The type of a tensor that is stored with this one.
    pub(crate) fn dtype(&self, stored: DType) -> DType {
        if matches!(self, Self::Affine { .. }) { DType::F32 } else { stored }
    }
}

/// The graph's tensors during construction.
pub(crate) struct Tensors {
    dtype: DType,
    pub(crate) list: Vec<Tensor>,
    pub(crate) pieces: Vec<Option<Piece>>,
}

impl Tensors {
    pub(crate) fn new(dtype: DType) -> Self {
        Self { dtype, list: Vec::new(), pieces: Vec::new() }
    }

    pub(crate) fn add(&mut self, name: &str, shape: &[u32]) -> TensorId {
        let id = TensorId(self.list.len() as u32);
        self.list.push(Tensor { name: name.to_owned(), dtype: self.dtype, shape: shape.to_vec() });
        self.pieces.push(None);
        id
    }

    /// Says what a tensor is made of.
    pub(crate) fn made_of(&mut self, id: TensorId, piece: Piece) {
        self.pieces[id.index()] = Some(piece);
    }

    /// Adds a norm of weights `(stored + add) * times`.
    pub(crate) fn norm(&mut self, name: &str, len: u32, add: f32, times: f32) -> TensorId {
        let id = self.add(name, &[len]);
        if (add, times) != (0.0, 1.0) {
            let change = Change::Affine { add, times };
            self.pieces[id.index()] =
                Some(Piece { name: name.to_owned(), first: 0, of: len, change });
        }
        id
    }

    /// Adds a linear map. `fused`: the matrix that is stored, and where the rows are in it: first row and rows.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        (rows, cols): (u32, u32),
        bias: bool,
        fused: Option<(String, u32, u32)>,
        order: Option<&HeadOrder>,
    ) -> Linear {
        let mut add = |part: &str, shape: &[u32]| {
            let id = self.add(&format!("{name}.{part}"), shape);
            if fused.is_some() || order.is_some() {
                let (stored, first, of) = fused.clone().unwrap_or((name.to_owned(), 0, rows));
                let change = order.map_or(Change::None, |order| Change::Order(order.clone()));
                let name = format!("{stored}.{part}");
                self.pieces[id.index()] = Some(Piece { name, first, of, change });
            }
            id
        };
        let weight = add("weight", &[rows, cols]);
        Linear { weight, scale: None, bias: bias.then(|| add("bias", &[rows])) }
    }
}
