//! Reads the text form.

use std::str::FromStr;

use abi::{Activation, BufferKind, Epilogue, Opcode, Prologue, Scoring, StructLayout, WireType};

use crate::format::Format;
use crate::graph::DType;
use crate::id::{BufferId, CounterId, MatrixId, TensorId};
use crate::program::{
    Buffer, BufferSource, Dims, Matrix, Pipeline, Program, RowMap, Task, Topology, Wait, Worker,
};

use super::lex::{Word, words};
use super::{FORMAT_VERSION, param_fields};

/// A syntax error in a text form, with its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Line, from one.
    pub line: u32,
    /// Column in characters, from one.
    pub column: u32,
    /// What is wrong, in one lower-case sentence.
    pub message: String,
}

/// Reads a program. It need not verify.
///
/// # Errors
/// The first syntax error.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    let mut parser = Parser { structs: abi::structs(), program: Program::default(), headers: 0 };
    let mut last = 0;
    for (line, number) in text.lines().zip(1_u32..) {
        last = number;
        let words = words(line, number)?;
        if let Some(first) = words.first() {
            parser.line(&mut Cursor {
                line: number,
                end: line.chars().count() as u32 + 1,
                words: &words[1..],
                first: first.clone(),
            })?;
        }
    }
    match HEADERS.get(parser.headers) {
        None => Ok(parser.program),
        Some(missing) => Err(ParseError {
            line: last.max(1),
            column: 1,
            message: format!("the text ends before its `{missing}` line"),
        }),
    }
}

/// The lines that every program begins with, in this order.
const HEADERS: [&str; 7] = ["amk", "model", "dims", "kv_capacity", "pipeline", "counters", "arena"];

/// The unread words of a line.
struct Cursor<'a> {
    line: u32,
    end: u32,
    first: Word,
    words: &'a [Word],
}

impl<'a> Cursor<'a> {
    fn error<T>(&self, column: u32, message: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError { line: self.line, column, message: message.into() })
    }

    fn next(&mut self, what: &str) -> Result<&'a Word, ParseError> {
        let Some((word, rest)) = self.words.split_first() else {
            return self.error(self.end, format!("the line ends where {what} is expected"));
        };
        self.words = rest;
        Ok(word)
    }

    fn peek(&self) -> Option<&'a str> {
        self.words.first().filter(|word| !word.quoted).map(|word| word.text.as_str())
    }

    fn take(&mut self, text: &str) -> bool {
        let hit = self.peek() == Some(text);
        if hit {
            self.words = &self.words[1..];
        }
        hit
    }

    fn string(&mut self, what: &str) -> Result<String, ParseError> {
        let word = self.next(what)?;
        if word.quoted {
            Ok(word.text.clone())
        } else {
            self.error(word.column, format!("{what} is a quoted string, not `{}`", word.text))
        }
    }

    fn parsed<T: FromStr>(&self, word: &Word, text: &str, what: &str) -> Result<T, ParseError> {
        match text.parse() {
            Ok(value) if !word.quoted => Ok(value),
            _ => self.error(word.column, format!("{what} cannot be `{text}`")),
        }
    }

    fn number<T: FromStr>(&mut self, what: &str) -> Result<T, ParseError> {
        let word = self.next(what)?;
        self.parsed(word, &word.text, what)
    }

    /// An id such as `s3`.
    fn id(&self, word: &Word, text: &str, letter: char) -> Result<u32, ParseError> {
        match text.strip_prefix(letter) {
            Some(digits) => self.parsed(word, digits, &format!("the number after `{letter}`")),
            None => {
                self.error(word.column, format!("expected `{letter}` and a number, not `{text}`"))
            }
        }
    }

    /// The id that a declaration must have: ids count up from zero.
    fn declared(&mut self, letter: char, index: usize) -> Result<(), ParseError> {
        let word = self.next("an id")?;
        let id = self.id(word, &word.text, letter)?;
        if id as usize == index {
            Ok(())
        } else {
            self.error(word.column, format!("expected {letter}{index}, not {letter}{id}"))
        }
    }

    /// The value of `name=value`.
    fn named(&mut self, name: &str) -> Result<(&'a Word, &'a str), ParseError> {
        let word = self.next(&format!("`{name}=`"))?;
        match word.text.split_once('=') {
            Some((key, value)) if key == name && !word.quoted => Ok((word, value)),
            _ => self.error(word.column, format!("expected `{name}=`, not `{}`", word.text)),
        }
    }

    fn named_number<T: FromStr>(&mut self, name: &str) -> Result<T, ParseError> {
        let (word, value) = self.named(name)?;
        self.parsed(word, value, name)
    }

    fn named_dtype(&mut self) -> Result<DType, ParseError> {
        let (word, value) = self.named("dtype")?;
        match DType::from_name(value) {
            Some(dtype) => Ok(dtype),
            None => self.error(word.column, format!("there is no element type `{value}`")),
        }
    }

    fn named_format(&mut self) -> Result<Format, ParseError> {
        let (word, value) = self.named("format")?;
        match Format::ALL.iter().find(|format| format.name() == value) {
            Some(format) => Ok(*format),
            None => self.error(word.column, format!("there is no weight format `{value}`")),
        }
    }

    fn done(&self) -> Result<(), ParseError> {
        match self.words.first() {
            None => Ok(()),
            Some(word) => self.error(word.column, format!("unexpected `{}`", word.text)),
        }
    }

    /// `%tensor:rows` or `zero:rows`, to the end of the line.
    fn map(&mut self, interleaved: bool) -> Result<RowMap, ParseError> {
        let mut parts = Vec::new();
        while !self.words.is_empty() {
            let word = self.next("a part")?;
            let Some((source, rows)) = word.text.split_once(':') else {
                return self.error(
                    word.column,
                    format!("expected `%tensor:rows` or `zero:rows`, not `{}`", word.text),
                );
            };
            let tensor =
                if source == "zero" { None } else { Some(TensorId(self.id(word, source, '%')?)) };
            parts.push((tensor, self.parsed(word, rows, "rows")?));
        }
        Ok(RowMap { parts, interleaved })
    }
}

struct Parser {
    structs: Vec<StructLayout>,
    program: Program,
    /// Header lines seen.
    headers: usize,
}

impl Parser {
    fn line(&mut self, cursor: &mut Cursor<'_>) -> Result<(), ParseError> {
        if let Some(&expected) = HEADERS.get(self.headers) {
            if cursor.first.text != expected {
                return cursor.error(
                    cursor.first.column,
                    format!("expected the `{expected}` line, not `{}`", cursor.first.text),
                );
            }
            self.headers += 1;
            self.header(cursor, expected)?;
            return cursor.done();
        }
        match cursor.first.text.clone().as_str() {
            "matrix" => self.matrix(cursor)?,
            "buffer" => self.buffer(cursor)?,
            "devices" => self.program.topology = topology(cursor)?,
            "worker" => {
                cursor.declared('w', self.program.workers.len())?;
                self.program.workers.push(Worker::default());
            }
            name => self.task(cursor, name)?,
        }
        cursor.done()
    }

    fn header(&mut self, cursor: &mut Cursor<'_>, name: &str) -> Result<(), ParseError> {
        let program = &mut self.program;
        match name {
            "amk" => {
                let column = cursor.first.column;
                let version: u32 = cursor.number("a format version")?;
                if version != FORMAT_VERSION {
                    return cursor.error(
                        column,
                        format!("format version {version}, this is {FORMAT_VERSION}"),
                    );
                }
            }
            "model" => program.model = cursor.string("the model's name")?,
            "dims" => program.dims = dims(cursor)?,
            "kv_capacity" => program.kv_capacity = cursor.number("a capacity")?,
            "pipeline" => program.pipeline = pipeline(cursor)?,
            "counters" => program.counters = cursor.number("a number of counters")?,
            _ => program.arena_bytes = cursor.number("bytes")?,
        }
        Ok(())
    }

    fn matrix(&mut self, cursor: &mut Cursor<'_>) -> Result<(), ParseError> {
        cursor.declared('m', self.program.matrices.len())?;
        let name = cursor.string("the matrix's name")?;
        let cols = cursor.named_number("cols")?;
        let format = cursor.named_format()?;
        let routed = cursor.words.first().is_some_and(|word| word.text.starts_with("experts="));
        let experts = if routed { cursor.named_number("experts")? } else { 1 };
        let interleaved = cursor.take("interleaved");
        if !interleaved && !cursor.take("rows") {
            return cursor.error(
                cursor.words.first().map_or(cursor.end, |w| w.column),
                "expected `rows` or `interleaved`",
            );
        }
        let map = cursor.map(interleaved)?;
        self.program.matrices.push(Matrix { name, map, cols, format, experts });
        Ok(())
    }

    fn buffer(&mut self, cursor: &mut Cursor<'_>) -> Result<(), ParseError> {
        cursor.declared('b', self.program.buffers.len())?;
        let name = cursor.string("the buffer's name")?;
        let word = cursor.next("a buffer kind")?;
        let Some(kind) = BufferKind::from_name(&word.text) else {
            return cursor.error(word.column, format!("there is no buffer kind `{}`", word.text));
        };
        let words = cursor.named_number("words")?;
        let offset = if cursor.peek().is_some_and(|w| w.starts_with("offset=")) {
            cursor.named_number("offset")?
        } else {
            0
        };
        let source = source(cursor)?;
        self.program.buffers.push(Buffer { name, kind, words, source, offset });
        Ok(())
    }

    fn worker(&mut self, cursor: &Cursor<'_>) -> Result<&mut Worker, ParseError> {
        let column = cursor.first.column;
        match self.program.workers.last_mut() {
            Some(worker) => Ok(worker),
            None => {
                cursor.error(column, format!("`{}` before the first `worker`", cursor.first.text))
            }
        }
    }

    fn task(&mut self, cursor: &mut Cursor<'_>, name: &str) -> Result<(), ParseError> {
        let Some(opcode) =
            Opcode::ALL.iter().copied().find(|op| op.info().name == name && !cursor.first.quoted)
        else {
            return cursor.error(
                cursor.first.column,
                format!("`{name}` is neither an op nor `matrix`, `buffer` or `worker`"),
            );
        };
        let mut task = Task::new(opcode, cursor.named_number("layer")?, [0_u32; 16]);
        while cursor.peek().is_some_and(|word| word.contains('=') && !word.contains('>')) {
            self.param(cursor, &mut task)?;
        }
        if cursor.take("reads") {
            buffers(cursor, &mut task.reads)?;
        }
        if cursor.take("->") {
            buffers(cursor, &mut task.writes)?;
        }
        if cursor.take("waits") {
            while cursor.peek().is_some_and(|word| word.contains(">=")) {
                let word = cursor.next("a wait")?;
                let (counter, count) = word.text.split_once(">=").unwrap_or_default();
                let counter = CounterId(cursor.id(word, counter, 'c')?);
                task.waits.push(Wait { counter, count: cursor.parsed(word, count, "a count")? });
            }
        }
        if cursor.take("signal") {
            let word = cursor.next("a counter")?;
            task.signal = Some(CounterId(cursor.id(word, &word.text, 'c')?));
        }
        self.worker(cursor)?.tasks.push(task);
        Ok(())
    }

    fn param(&self, cursor: &mut Cursor<'_>, task: &mut Task) -> Result<(), ParseError> {
        let word = cursor.next("a parameter")?;
        let (name, value) = word.text.split_once('=').unwrap_or_default();
        let op = task.opcode.info().name;
        let Some(field) =
            param_fields(task.opcode, &self.structs).iter().find(|field| field.name == name)
        else {
            return cursor.error(word.column, format!("`{op}` has no parameter `{name}`"));
        };
        let first = field.offset / 4;
        if let Some(len) = field.len {
            let list: Vec<&str> = value.split(',').collect();
            if list.len() != len {
                return cursor
                    .error(word.column, format!("`{name}` has {len} words, not {}", list.len()));
            }
            for (place, text) in task.params[first..first + len].iter_mut().zip(list) {
                *place = cursor.parsed(word, text, name)?;
            }
            return Ok(());
        }
        let named = match name {
            "prologue" => Prologue::from_name(value).map(|v| v as u32),
            "epilogue" => Epilogue::from_name(value).map(|v| v as u32),
            "scoring" => Scoring::from_name(value).map(|v| v as u32),
            "activation" => Activation::from_name(value).map(|v| v as u32),
            "matrix" => Some(cursor.id(word, value, 'm')?),
            _ => None,
        };
        task.params[first] = match named {
            Some(number) => number,
            None if field.ty == WireType::F32 => match value.strip_prefix("0x") {
                Some(digits) => match u32::from_str_radix(digits, 16) {
                    Ok(bits) => bits,
                    Err(_) => {
                        return cursor.error(word.column, format!("{name} cannot be `{value}`"));
                    }
                },
                None => cursor.parsed::<f32>(word, value, name)?.to_bits(),
            },
            None => cursor.parsed(word, value, name)?,
        };
        Ok(())
    }
}

fn dims(cursor: &mut Cursor<'_>) -> Result<Dims, ParseError> {
    Ok(Dims {
        hidden: cursor.named_number("hidden")?,
        heads: cursor.named_number("heads")?,
        kv_heads: cursor.named_number("kv_heads")?,
        head_dim: cursor.named_number("head_dim")?,
        ffn: cursor.named_number("ffn")?,
        vocab: cursor.named_number("vocab")?,
        layers: cursor.named_number("layers")?,
        dtype: cursor.named_dtype()?,
    })
}

fn topology(cursor: &mut Cursor<'_>) -> Result<Topology, ParseError> {
    let mut topology = Topology { devices: cursor.number("devices")?, replicated: Vec::new() };
    if !cursor.take("replicated") {
        let column = cursor.words.first().map_or(cursor.end, |word| word.column);
        return cursor.error(column, "expected `replicated`");
    }
    while !cursor.words.is_empty() {
        let word = cursor.next("a buffer")?;
        topology.replicated.push(BufferId(cursor.id(word, &word.text, 'b')?));
    }
    Ok(topology)
}

fn pipeline(cursor: &mut Cursor<'_>) -> Result<Pipeline, ParseError> {
    Ok(Pipeline {
        stage_units: cursor.named_number("stage_units")?,
        stages: cursor.named_number("stages")?,
        in_flight: cursor.named_number("in_flight")?,
        in_flight_before_wait: cursor.named_number("in_flight_before_wait")?,
    })
}

fn source(cursor: &mut Cursor<'_>) -> Result<BufferSource, ParseError> {
    if cursor.words.is_empty() {
        return Ok(BufferSource::Scratch);
    }
    let word = cursor.next("a source")?;
    Ok(match word.text.as_str() {
        "rows" => BufferSource::Vector(cursor.map(false)?),
        "interleaved" => BufferSource::Vector(cursor.map(true)?),
        "inv_freq" => BufferSource::Rotary(0),
        "rotary" => BufferSource::Rotary(cursor.number("a table")?),
        "cache" => BufferSource::KvCache { layer: cursor.number("a layer")? },
        "embedding" => {
            let word = cursor.next("a matrix")?;
            BufferSource::Embedding(MatrixId(cursor.id(word, &word.text, 'm')?))
        }
        other => return cursor.error(word.column, format!("there is no buffer source `{other}`")),
    })
}

/// Buffers by place, as many as there are.
fn buffers(cursor: &mut Cursor<'_>, places: &mut [Option<BufferId>]) -> Result<(), ParseError> {
    let limit = places.len();
    let mut used = 0;
    while let Some(text) = cursor.peek().filter(|text| *text == "_" || is_buffer(text)) {
        let word = cursor.next("a buffer")?;
        let Some(place) = places.get_mut(used) else {
            return cursor.error(word.column, format!("more than {limit} buffers"));
        };
        used += 1;
        if text == "_" {
            continue;
        }
        *place = Some(BufferId(cursor.id(word, &word.text, 'b')?));
    }
    Ok(())
}

fn is_buffer(text: &str) -> bool {
    text.strip_prefix('b').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}
