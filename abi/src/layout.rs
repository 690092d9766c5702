//! `wire_struct!`: a `repr(C)` Pod struct that also records its field offsets, so that a test can assert each of them in C.

/// A field's type, as both sides spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireType {
    /// `u16` / `uint16_t`.
    U16,
    /// `u32` / `uint32_t`.
    U32,
    /// `u64` / `uint64_t`.
    U64,
    /// `f32` / `float`.
    F32,
    /// `u8` / `uint8_t`.
    U8,
}

impl WireType {
    /// The C spelling.
    #[must_use]
    pub const fn c_name(self) -> &'static str {
        match self {
            Self::U8 => "uint8_t",
            Self::U16 => "uint16_t",
            Self::U32 => "uint32_t",
            Self::U64 => "uint64_t",
            Self::F32 => "float",
        }
    }
}

/// Maps a Rust field type to its wire type and array length (`None` for a scalar).
pub(crate) trait Wire {
    const TYPE: WireType;
    const LEN: Option<usize>;
}
macro_rules! wire {
    ($($rust:ty => $wire:ident),+) => {$(
        impl Wire for $rust {
            const TYPE: WireType = WireType::$wire;
            const LEN: Option<usize> = None;
        }
        impl<const N: usize> Wire for [$rust; N] {
            const TYPE: WireType = WireType::$wire;
            const LEN: Option<usize> = Some(N);
        }
    )+};
}
wire!(u8 => U8, u16 => U16, u32 => U32, u64 => U64, f32 => F32);

/// One field of a wire struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name, the same on both sides.
    pub name: &'static str,
    /// Element type.
    pub ty: WireType,
    /// Array length, `None` for a scalar.
    pub len: Option<usize>,
    /// Byte offset.
    pub offset: usize,
    /// First line of the field's doc comment.
    pub doc: &'static str,
}

/// The layout of a wire struct.
#[derive(Clone, Copy, Debug)]
pub struct StructLayout {
    /// C name, such as `amk_task`.
    pub c_name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// The fields in order.
    pub fields: &'static [Field],
}

macro_rules! wire_struct {
    (
        $(#[$sdoc:meta])+
        $c_name:ident align($align:literal) size($size:literal)
        pub struct $name:ident { $($(#[doc = $fdoc:literal])+ pub $field:ident: $ty:ty,)+ }
    ) => {
        $(#[$sdoc])+
        #[repr(C, align($align))]
        #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name { $($(#[doc = $fdoc])+ pub $field: $ty,)+ }

        const _: () = assert!(size_of::<$name>() == $size);
        const _: () = assert!(align_of::<$name>() == $align);

        impl $name {
            /// Layout, for the generated header.
            pub(crate) const LAYOUT: $crate::StructLayout = $crate::StructLayout {
                c_name: stringify!($c_name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$($crate::Field {
                    name: stringify!($field),
                    ty: <$ty as $crate::layout::Wire>::TYPE,
                    len: <$ty as $crate::layout::Wire>::LEN,
                    offset: core::mem::offset_of!($name, $field),
                    doc: $crate::layout::first(&[$($fdoc),+]),
                }),+],
            };
        }

        impl Default for $name {
            fn default() -> Self {
                bytemuck::Zeroable::zeroed()
            }
        }
    };
}
pub(crate) use wire_struct;

/// The first line of a doc comment.
pub(crate) const fn first(lines: &[&'static str]) -> &'static str {
    lines[0]
}

/// Every wire struct, in declaration order.
#[must_use]
pub fn structs() -> Vec<StructLayout> {
    let mut all = vec![
        crate::Task::LAYOUT,
        crate::Load::LAYOUT,
        crate::Routed::LAYOUT,
        crate::Queue::LAYOUT,
        crate::BufferDesc::LAYOUT,
        crate::ProgramHeader::LAYOUT,
        crate::StepState::LAYOUT,
        crate::SeqStates::LAYOUT,
        crate::Launch::LAYOUT,
        crate::Exchange::LAYOUT,
        crate::WeightStream::LAYOUT,
        crate::Done::LAYOUT,
        crate::TaskRecord::LAYOUT,
        crate::LoaderRecord::LAYOUT,
        crate::Submission::LAYOUT,
        crate::Completion::LAYOUT,
        crate::SessionSampling::LAYOUT,
        crate::Bias::LAYOUT,
        crate::RingIndices::LAYOUT,
        crate::Status::LAYOUT,
        crate::WorkerHeartbeat::LAYOUT,
    ];
    all.extend(crate::op::param_layouts());
    all
}
