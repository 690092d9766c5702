//! The kernels of a server by number: those of its start, and one for each schedule that it has switched to. A number
//! means the same kernel for as long as the server runs, so that an answer is named by what ran it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use ir::program::{Program, Verified};

/// An answer has a bit for each kernel that ran it.
const KERNELS_MAX: usize = 32;

struct Row {
    name: String,
    program: Arc<Verified<Program>>,
}

/// The table. One thread adds rows; any thread reads them.
#[derive(Default)]
pub(crate) struct KernelTable {
    rows: [OnceLock<Row>; KERNELS_MAX],
    /// The kernel that a sequence begins with.
    first: AtomicUsize,
}

impl std::fmt::Debug for KernelTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl KernelTable {
    /// The name of a kernel in fingerprints: its sequences, and its program.
    pub(crate) fn name(seqs: u32, program: &Program) -> String {
        let id = program.id();
        format!("b{seqs}-{}", id.get(..8).unwrap_or(&id))
    }

    /// The number of a program for commands of `seqs` sequences, a new one unless it is there. `None` if the table is
    /// full.
    pub(crate) fn add(&self, seqs: u32, program: &Arc<Verified<Program>>) -> Option<usize> {
        let name = Self::name(seqs, program);
        let place =
            self.rows.iter().position(|row| row.get().is_none_or(|row| row.name == name))?;
        self.rows[place].get_or_init(|| Row { name, program: program.clone() });
        Some(place)
    }

    pub(crate) fn program(&self, number: usize) -> Option<&Verified<Program>> {
        Some(&self.rows.get(number)?.get()?.program)
    }

    /// Sets the kernel that sequences begin with from now on.
    pub(crate) fn begin_with(&self, number: usize) {
        self.first.store(number, Ordering::Relaxed);
    }

    /// The names of all kernels.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().map_while(|row| Some(row.get()?.name.as_str()))
    }

    /// The names of a set of kernels, a bit each; of the one that sequences begin with if it is empty.
    pub(crate) fn names_of(&self, kernels: u32) -> String {
        let first = 1 << self.first.load(Ordering::Relaxed);
        let kernels = if kernels == 0 { first } else { kernels };
        let used = self.names().zip(0..).filter(|(_, number)| kernels >> number & 1 == 1);
        used.map(|(name, _)| name).collect::<Vec<_>>().join("+")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stays_what_it_is_and_the_table_ends() {
        let table = KernelTable::default();
        assert_eq!(table.names_of(0), "", "the graph has no kernel");
        let model = model::preset("toy").unwrap();
        let target = ir::Target::by_name("h200").unwrap();
        let config = ir::schedule::neutral_config(&model.graph, &target);
        let valid = ir::schedule::validate(config, &model.graph, &target).unwrap();
        let options = lower::Options { kv_capacity: 24 };
        let program = Arc::new(lower::lower(&valid, &model.graph, &target, options).unwrap());
        let add = |seqs| table.add(seqs, &program);
        assert_eq!([add(8), add(1), add(8)], [Some(0), Some(1), Some(0)]);
        let names: Vec<String> = table.names().map(str::to_owned).collect();
        assert_eq!(names, [8, 1].map(|seqs| KernelTable::name(seqs, &program)));
        assert_eq!(
            [0, 1, 2, 3].map(|of| table.names_of(of)),
            [names[0].clone(), names[0].clone(), names[1].clone(), names.join("+")]
        );
        table.begin_with(1);
        assert_eq!(table.names_of(0), names[1]);
        assert_eq!((2..32).filter_map(|seqs| add(seqs + 8)).count(), 30);
        assert_eq!(add(99), None);
    }
}
