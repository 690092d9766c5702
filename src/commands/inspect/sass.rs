//! Machine code as text: instructions by op and source line.
//!
//! nvdisasm writes above an instruction where it is from: its line, then the calls that were inlined, outermost last.
//! The op is named by the call in `dispatch.cuh` among them.

use std::collections::BTreeMap;

use serde::Serialize;

/// The source file in which each op is called once.
const DISPATCH: &str = "cuda/dispatch.cuh";
/// What no op contains: the loop over tasks, loader, poller, sampler.
const REST: &str = "(outside of ops)";

/// The instructions of an op.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Op {
    pub(super) op: String,
    pub(super) instructions: usize,
    /// Loads and stores of spilled registers among them.
    pub(super) local: usize,
    /// The source lines with most instructions.
    pub(super) lines: Vec<Line>,
}

/// The instructions of a source line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Line {
    /// `FILE:LINE`, in the sources of the kernel.
    pub(super) source: String,
    pub(super) instructions: usize,
}

#[derive(Default)]
struct Count {
    instructions: usize,
    local: usize,
    lines: BTreeMap<(String, usize), usize>,
}

/// The ops of a kernel by instructions, most first, each with at most `most` lines.
pub(super) fn ops(text: &str, kernel: &str, most: usize) -> Vec<Op> {
    let begin = format!(".text.{kernel}:");
    let code = text.lines().skip_while(|line| line.trim() != begin).skip(1);
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    let mut place: Vec<(String, usize)> = Vec::new();
    let mut fresh = true;
    for line in
        code.take_while(|line| !line.starts_with("//---") && !line.starts_with("\t.section"))
    {
        let line = line.trim();
        if let Some(from) = line.strip_prefix("//## File ") {
            if fresh {
                place.clear();
            }
            fresh = false;
            place.extend(place_of(from));
        } else if let Some(instruction) = instruction(line) {
            fresh = true;
            let count = counts.entry(op(&place)).or_default();
            count.instructions += 1;
            count.local += usize::from(["LDL", "STL"].iter().any(|op| instruction.starts_with(op)));
            if let Some(at) = place.first() {
                *count.lines.entry(at.clone()).or_default() += 1;
            }
        }
    }
    let mut ops: Vec<Op> = counts.into_iter().map(|(op, count)| count.into_op(op, most)).collect();
    ops.sort_by_key(|op| std::cmp::Reverse(op.instructions));
    ops
}

impl Count {
    fn into_op(self, op: String, most: usize) -> Op {
        let line =
            |((file, line), instructions)| Line { source: format!("{file}:{line}"), instructions };
        let mut lines: Vec<Line> = self.lines.into_iter().map(line).collect();
        lines.sort_by_key(|line| std::cmp::Reverse(line.instructions));
        lines.truncate(most);
        Op { op, instructions: self.instructions, local: self.local, lines }
    }
}

/// File and line of `"FILE", line N` with or without what it is inlined at; the file as the sources are named.
fn place_of(from: &str) -> Option<(String, usize)> {
    let (file, rest) = from.strip_prefix('"')?.split_once('"')?;
    let number = rest.strip_prefix(", line ")?;
    let number: String = number.chars().take_while(char::is_ascii_digit).collect();
    let file = file.rfind("cuda/").map_or(file, |at| &file[at..]);
    Some((file.to_owned(), number.parse().ok()?))
}

/// The instruction of a line such as `/*0030*/  @P0 EXIT ;`, without its predicate.
fn instruction(line: &str) -> Option<&str> {
    let (offset, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let hex = !offset.is_empty() && offset.chars().all(|c| c.is_ascii_hexdigit());
    let rest = rest.trim_start();
    let rest = if rest.starts_with('@') { rest.split_once(' ')?.1.trim_start() } else { rest };
    (hex && rest.starts_with(|c: char| c.is_ascii_uppercase())).then_some(rest)
}

/// The op that is called where these calls were inlined.
fn op(place: &[(String, usize)]) -> String {
    let called = place.iter().find_map(|(file, line)| called_at(file, *line));
    called.unwrap_or_else(|| REST.to_owned())
}

/// The op that a line of `dispatch.cuh` calls.
fn called_at(file: &str, line: usize) -> Option<String> {
    let source =
        vm_device::ARCHITECTURES[0].sources.iter().find(|source| source.name == DISPATCH)?;
    let text = (file == DISPATCH).then(|| source.text.lines().nth(line - 1))??;
    let name = text.trim().strip_prefix("op_")?.split('(').next()?;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of `dispatch.cuh` that call an op, by its name.
    fn call(op: &str) -> usize {
        (1..100).find(|&line| called_at(DISPATCH, line).as_deref() == Some(op)).expect("a call")
    }

    #[test]
    fn instructions_belong_to_the_op_that_is_called_around_them() {
        let [embed, merge] = ["embed", "attention_merge"].map(call);
        let file = |name: &str, line: usize| format!("//## File \"/x/cuda/{name}\", line {line}");
        let at = |name: &str, line: usize| format!(" inlined at \"/x/cuda/{name}\", line {line}");
        let text = [
            ".text.other:".to_owned(),
            "        /*0000*/                   EXIT ;".to_owned(),
            ".text.amk_megakernel:".to_owned(),
            format!("\t{}", file("worker.cuh", 7)),
            "        /*0000*/                   LDC R1, c[0x0][0x28] ;".to_owned(),
            format!("\t{}{}", file("op_small.cuh", 5), at("dispatch.cuh", embed)),
            format!("\t{}", file("dispatch.cuh", embed)),
            "        /*0010*/               @P0 STL [R1], R2 ;".to_owned(),
            ".L_x_1:".to_owned(),
            "        /*0020*/                   IADD3 R1, R2, R3, RZ ;".to_owned(),
            format!("\t{}{}", file("op_attention_merge.cuh", 9), at("dispatch.cuh", merge)),
            format!("\t{}", file("dispatch.cuh", merge)),
            "        /*0030*/              @!P1 LDL R2, [R1] ;".to_owned(),
            "//--------------------- SYMBOLS".to_owned(),
            "        /*0040*/                   NOP ;".to_owned(),
        ]
        .join("\n");
        let found = ops(&text, "amk_megakernel", 5);
        let by = |name: &str| found.iter().find(|op| op.op == name).expect("an op");
        assert_eq!((found[0].op.as_str(), found[0].instructions, found[0].local), ("embed", 2, 1));
        assert_eq!(
            by("embed").lines,
            [Line { source: "cuda/op_small.cuh:5".into(), instructions: 2 }]
        );
        assert_eq!((by("attention_merge").instructions, by("attention_merge").local), (1, 1));
        assert_eq!(by(REST).instructions, 1);
        assert_eq!(
            found.iter().map(|op| op.instructions).sum::<usize>(),
            4,
            "and nothing of others"
        );
        assert_eq!(ops(&text, "amk_megakernel", 0)[0].lines, []);
    }

    #[test]
    fn every_op_is_called_in_the_file_that_names_them() {
        let source =
            vm_device::ARCHITECTURES[0].sources.iter().find(|source| source.name == DISPATCH);
        let lines = source.expect("the file").text.lines().count();
        let called: Vec<String> =
            (1..=lines).filter_map(|line| called_at(DISPATCH, line)).collect();
        // A task that does nothing is no call.
        for op in abi::Opcode::ALL.iter().filter(|op| **op != abi::Opcode::Nop) {
            assert!(
                called.iter().any(|name| name == op.info().name),
                "{} in {called:?}",
                op.info().name
            );
        }
    }
}
