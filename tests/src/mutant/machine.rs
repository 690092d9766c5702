//! Mutants of the machine: kernel mistakes that no operand expresses.

use reference_vm::Defect;

use super::{Base, Mistake, Mutant};

/// The class of a defect.
fn class(defect: Defect) -> &'static str {
    match defect {
        Defect::NextToken => "machine: token",
        Defect::NoNormScale => "machine: norm",
        Defect::LateQueries
        | Defect::LateKeys
        | Defect::LateBoth
        | Defect::Backwards
        | Defect::Neighbours => "machine: position and rotation",
        Defect::ShiftedKeys | Defect::NextHead | Defect::TurnedValues => "machine: cache index",
        Defect::NoOldest | Defect::NoNewest => "machine: range of keys",
        Defect::NoTotals | Defect::NoGreatest => "machine: joining splits",
        Defect::NoResidual | Defect::TwiceResidual => "machine: residual",
        Defect::Relu | Defect::Gelu | Defect::Linear => "machine: activation",
        Defect::LeastLikely => "machine: sampling",
    }
}

/// Every defect in every layer alone and in all, under each schedule.
#[must_use]
pub fn defects<'b>(base: &Base) -> Vec<Mutant<'b>> {
    let layers = base.graph().layers.len() as u16;
    let places = || (0..layers).map(Some).chain([None]);
    let mut all = Vec::new();
    for schedule in 0..base.schedules() {
        for &defect in Defect::ALL {
            for layer in places() {
                let place = layer.map_or_else(|| "all layers".to_owned(), |l| format!("layer {l}"));
                all.push(Mutant {
                    class: class(defect).to_owned(),
                    what: format!("{}, in {place}, schedule {schedule}", defect.name()),
                    schedule,
                    mistake: Mistake::Machine(defect, layer),
                });
            }
        }
    }
    all
}
