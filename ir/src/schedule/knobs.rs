//! The knob table and its expansions. A knob is added only here (a phase's knobs: in its row of the phase table); then
//! `lower` or the kernel build must read it.

use serde::{Deserialize, Serialize};

use super::value::{
    Domain, EmbedGrouping, Evict, Handoff, KnobType, MergeGrouping, SmAssignment, Value,
};
use crate::phase::{PhaseClass, for_each_phase, optional};

/// Calls `$macro` with the whole knob table: the structs of a config, outermost first, each with its groups and its
/// knobs. A knob's row: field, type, variant, dotted path, legal values, neutral value, what it acts on, one sentence.
macro_rules! for_each_knob {
    (($macro:ident) $(
        $name:ident = $class:ident, op $op:ident $($matrix:literal)? $(, buffer $buffer:literal)?
        $(, sync $sync:ident $handed:literal)? $(, rows $rows:ident $tiling:ident $what:literal $dealt:literal)?;
    )+) => {
        $macro! {
            /// A schedule: every choice that a search may make. Built from the table's neutral values or parsed from JSON; checked by `validate`.
            struct ScheduleConfig {
                groups {
                    /// The ring of arrived weights.
                    pipeline: Pipeline,
                    /// How each phase hands its output over.
                    sync: Handoffs,
                    /// Which ops share a phase.
                    fusion_grouping: FusionGrouping,
                    /// How much of a phase is dealt at once.
                    tiling: Tiling,
                    /// What the kernel is compiled with.
                    kernel: KernelConfig,
                }
                knobs {
                    sm_assignment: SmAssignment = SmAssignmentPolicy at sm_assignment, names SmAssignment::VALUES,
                        default SmAssignment::RoundRobin, program, "Which workers get the blocks that do not divide evenly.";
                }
            }
            /// The ring of arrived weights of each worker.
            struct Pipeline {
                groups {}
                knobs {
                    stage_bytes: u32 = PipelineStageBytes at pipeline.stage_bytes, numbers [8192, 16384, 32768],
                        default 16384, program, "Bytes of one copy, and of one stage of the weight ring.";
                    stages: u32 = PipelineStages at pipeline.stages, range [2, 25, 1],
                        default 8, program, "Stages of the weight ring of each worker; it must fit in shared memory beside the activation buffer.";
                    in_flight_bytes: u32 = PipelineInFlightBytes at pipeline.in_flight_bytes, range [8192, 131072, 8192],
                        default 65536, program, "Cap on the bytes on their way to a worker: whole stages, at most the ring.";
                    in_flight_before_wait_bytes: u32 = PipelineInFlightBeforeWaitBytes at pipeline.in_flight_before_wait_bytes, range [8192, 131072, 8192],
                        default 65536, program, "The same cap while the worker is about to receive a hand-off; at most in_flight_bytes.";
                }
            }
            /// How each phase hands its output over.
            struct Handoffs {
                groups {}
                knobs {
                    $($($name: Handoff = $sync at sync.$name, names Handoff::VALUES,
                        default Handoff::Counter, program, $handed;)?)+
                }
            }
            /// Which ops share a phase.
            struct FusionGrouping {
                groups {}
                knobs {
                    embed: EmbedGrouping = FusionGroupingEmbed at fusion_grouping.embed, names EmbedGrouping::VALUES,
                        default EmbedGrouping::Separate, program, "Whether the embedding row is a phase of its own or read by the first layer.";
                    merge: MergeGrouping = FusionGroupingMerge at fusion_grouping.merge, names MergeGrouping::VALUES,
                        default MergeGrouping::Separate, program, "Whether partials are combined in a phase of its own or by every output projection task.";
                }
            }
            /// How much of a phase is dealt at once.
            struct Tiling {
                groups {
                    $($(#[doc = $what] $name: $tiling,)?)+
                    /// Attention.
                    attention: AttentionTiling,
                }
                knobs {}
            }
            $($(#[doc = $what] struct $tiling {
                groups {}
                knobs {
                    rows: u32 = $rows at tiling.$name.rows, numbers [8, 16, 32, 64],
                        default 16, program, $dealt;
                }
            })?)+
            /// Tiling of attention.
            struct AttentionTiling {
                groups {}
                knobs {
                    kv_block: u32 = TilingAttentionKvBlock at tiling.attention.kv_block, numbers [32, 64, 128, 256, 512, 1024],
                        default 128, program, "Keys of a block; splits are made of whole blocks.";
                    kv_split: u32 = TilingAttentionKvSplit at tiling.attention.kv_split, numbers [1, 2, 4, 8, 16, 32],
                        default 1, program, "Workers that share the keys of one key/value head.";
                }
            }
            /// What the kernel is compiled with; equal kernel configs share one build.
            struct KernelConfig {
                groups {}
                knobs {
                    poll_sleep_ns: u32 = KernelPollSleepNs at kernel.poll_sleep_ns, numbers [0, 20, 100],
                        default 20, kernel, "Nanoseconds between two looks at a counter or tag.";
                    evict: Evict = KernelEvict at kernel.evict, names Evict::VALUES,
                        default Evict::Normal, kernel, "What the weight stream does to the L2 cache.";
                }
            }
        }
    };
}

/// What a knob changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ActsOn {
    /// The lowered program: a new value is uploaded beside the running one.
    Program,
    /// The kernel build: a new value is compiled and launched.
    Kernel,
}

impl ActsOn {
    /// The lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Kernel => "kernel",
        }
    }
}

macro_rules! domain {
    (names $values:expr) => {
        Domain::Choices($values)
    };
    (numbers [$($value:literal),+]) => {
        Domain::Choices(&[$(Value::Number($value)),+])
    };
    (range [$min:literal, $max:literal, $step:literal]) => {
        Domain::Range { min: $min, max: $max, step: $step }
    };
}

macro_rules! acts_on {
    (program) => {
        ActsOn::Program
    };
    (kernel) => {
        ActsOn::Kernel
    };
}

macro_rules! define_knobs {
    ($(
        $(#[$sdoc:meta])+
        struct $name:ident {
            groups { $($(#[$gdoc:meta])+ $group:ident: $group_type:ident,)* }
            knobs { $(
                $field:ident: $type:ident = $variant:ident at $($path:ident).+, $domain:ident $values:tt $(:: $values2:ident)?,
                default $default:expr, $acts_on:ident, $desc:literal;
            )* }
        }
    )+) => {
        $(
            $(#[$sdoc])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $name {
                $($(#[$gdoc])+ pub $group: $group_type,)*
                $(#[doc = $desc] pub $field: $type,)*
            }

            impl Default for $name {
                fn default() -> Self {
                    Self { $($group: $group_type::default(),)* $($field: $default,)* }
                }
            }
        )+

        /// A knob of the schedule.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Knob { $($(#[doc = $desc] $variant,)*)+ }

        impl Knob {
            /// Every knob in table order.
            pub const ALL: &'static [Self] = &[$($(Self::$variant,)*)+];

            /// The dotted path, such as `pipeline.stage_bytes`.
            #[must_use]
            pub const fn path(self) -> &'static str {
                match self {
                    $($(Self::$variant => {
                        const DOTTED: &str = concat!($(stringify!($path), "."),+);
                        DOTTED.split_at(DOTTED.len() - 1).0
                    })*)+
                }
            }

            /// The values that the table allows, before any graph or target narrows them.
            #[must_use]
            pub const fn domain(self) -> Domain {
                match self { $($(Self::$variant => domain!($domain $values $(:: $values2)?),)*)+ }
            }

            /// The table's value, used by the neutral schedule.
            #[must_use]
            pub fn default(self) -> Value {
                match self { $($(Self::$variant => <$type as KnobType>::to_value($default),)*)+ }
            }

            /// What the knob changes.
            #[must_use]
            pub const fn acts_on(self) -> ActsOn {
                match self { $($(Self::$variant => acts_on!($acts_on),)*)+ }
            }

            /// The knob in one sentence.
            #[must_use]
            pub const fn desc(self) -> &'static str {
                match self { $($(Self::$variant => $desc,)*)+ }
            }
        }

        impl ScheduleConfig {
            /// The value of a knob.
            #[must_use]
            pub fn get(&self, knob: Knob) -> Value {
                match knob { $($(Knob::$variant => self.$($path).+.to_value(),)*)+ }
            }

            /// Sets a knob, if the table allows the value. `validate` checks whether it fits a graph and target.
            ///
            /// # Errors
            /// The knob's domain, if the value is not in it.
            pub fn set(&mut self, knob: Knob, value: Value) -> Result<(), Domain> {
                if !knob.domain().contains(value) {
                    return Err(knob.domain());
                }
                match knob {
                    $($(Knob::$variant => self.$($path).+ = KnobType::from_value(value).ok_or(knob.domain())?,)*)+
                }
                Ok(())
            }
        }
    };
}
for_each_phase!(for_each_knob!(define_knobs));

macro_rules! phase_knobs {
    (() $(
        $name:ident = $class:ident, op $op:ident $($matrix:literal)? $(, buffer $buffer:literal)?
        $(, sync $sync:ident $handed:literal)? $(, rows $rows:ident $tiling:ident $what:literal $dealt:literal)?;
    )+) => {
        impl PhaseClass {
            /// The hand-off knob of the phase.
            #[must_use]
            pub const fn sync(self) -> Option<Knob> {
                match self { $(Self::$class => optional!($(Knob::$sync)?),)+ }
            }

            /// The tiling knob of the phase: rows dealt at once.
            #[must_use]
            pub const fn tiling(self) -> Option<Knob> {
                match self { $(Self::$class => optional!($(Knob::$rows)?),)+ }
            }
        }
    };
}
for_each_phase!(phase_knobs!());

impl PhaseClass {
    /// The phase's hand-off in a config, if there is a knob for it.
    #[must_use]
    pub fn handoff(self, config: &ScheduleConfig) -> Option<Handoff> {
        Handoff::from_value(config.get(self.sync()?))
    }

    /// The rows that a config deals at once in the phase, if there is a knob for it.
    #[must_use]
    pub fn rows(self, config: &ScheduleConfig) -> Option<u32> {
        u32::from_value(config.get(self.tiling()?))
    }
}

impl Knob {
    /// Every value that the table allows, in table order.
    #[must_use]
    pub fn values(self) -> Vec<Value> {
        self.domain().values()
    }

    /// The knob with this dotted path.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|knob| knob.path() == path)
    }

    /// The JSON type of its values: `integer` or `string`.
    #[must_use]
    pub fn type_name(self) -> &'static str {
        if self.domain().is_names() { "string" } else { "integer" }
    }
}

impl std::fmt::Display for Knob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.path())
    }
}

impl ScheduleConfig {
    /// This schedule with one change, written `KNOB=VALUE`, and the knob. `validate` checks whether it is legal.
    ///
    /// # Errors
    /// What is wrong with the text, and what the knob takes.
    pub fn with_change(mut self, text: &str) -> Result<(Self, Knob), String> {
        let (path, value) = text.split_once('=').ok_or("write KNOB=VALUE")?;
        let knob = Knob::from_path(path)
            .ok_or_else(|| format!("there is no knob {path}; amk levers lists them"))?;
        let refused = || format!("{path} takes {}", knob.domain());
        let value = knob.values().into_iter().find(|of| of.to_string() == value);
        self.set(knob, value.ok_or_else(refused)?).map_err(|_| refused())?;
        Ok((self, knob))
    }
}

impl KernelConfig {
    /// The stable id of this kernel config.
    #[must_use]
    pub fn id(&self) -> String {
        super::content_id("kernel", self)
    }
}

impl ScheduleConfig {
    /// The stable id of the schedule: equal configs have equal ids, on every machine, however they were written.
    #[must_use]
    pub fn id(&self) -> String {
        super::content_id("schedule", self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_knob_has_a_path_a_legal_default_and_several_values() {
        let config = ScheduleConfig::default();
        for knob in Knob::ALL {
            assert_eq!(Knob::from_path(knob.path()), Some(*knob));
            assert!(knob.domain().contains(knob.default()), "{knob}");
            assert!(knob.values().len() > 1, "{knob}");
            assert_eq!(config.get(*knob), knob.default(), "{knob}");
            assert!(knob.desc().ends_with('.'), "{knob}");
        }
        assert_eq!(Knob::TilingGateUpRows.path(), "tiling.gate_up.rows");
        assert_eq!(Knob::SmAssignmentPolicy.path(), "sm_assignment");
    }

    #[test]
    fn paths_are_the_places_in_the_json() {
        let json = serde_json::to_value(ScheduleConfig::default()).expect("serializes");
        for knob in Knob::ALL {
            let pointer = format!("/{}", knob.path().replace('.', "/"));
            assert_eq!(json.pointer(&pointer), Some(&knob.default().to_json()), "{knob}");
        }
    }

    #[test]
    fn set_changes_that_knob_alone_and_refuses_other_values() {
        for knob in Knob::ALL {
            for value in knob.values() {
                let mut config = ScheduleConfig::default();
                assert_eq!(config.set(*knob, value), Ok(()));
                for other in Knob::ALL {
                    let expected = if other == knob { value } else { other.default() };
                    assert_eq!(config.get(*other), expected, "{other} after {knob}");
                }
                assert_eq!(config.id() == ScheduleConfig::default().id(), value == knob.default());
            }
            let mut config = ScheduleConfig::default();
            assert_eq!(config.set(*knob, Value::Number(77)), Err(knob.domain()));
            assert_eq!(config.set(*knob, Value::Name("banana")), Err(knob.domain()));
        }
    }
}
