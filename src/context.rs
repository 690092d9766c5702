//! What the commands share: a loaded model, its target and the schedule that a file gives.

use ir::schedule::{KernelConfig, ScheduleConfig};
use ir::{Graph, Rule, Target, Violations};
use model::Model;
use remote::Remote;

use crate::cli::{DeviceChoice, ModelArgs, PlaceArgs, SharingArgs};
use crate::config_source::ConfigSource;
use crate::device::{Gpu, live_target, look, look_at, open_here, open_once, open_process};
use crate::failure::Failure;

/// The target when there is no live device and none is named.
const DEFAULT_TARGET: &str = "h200";

/// Tokens of the key/value cache when nothing else is said.
const DEFAULT_KV_CAPACITY: u32 = 4096;

/// A model and where it is to run.
pub(crate) struct Context {
    /// The model.
    pub(crate) model: Model,
    /// The GPU to schedule for.
    pub(crate) target: Target,
    /// Tokens of the key/value cache.
    pub(crate) kv_capacity: u32,
    /// The model as it was named.
    pub(crate) name: String,
    /// The target, if one was named.
    pub(crate) named_target: Option<String>,
    device: DeviceChoice,
}

impl Context {
    /// Loads what the arguments name.
    pub(crate) fn new(args: &ModelArgs) -> Result<Self, Failure> {
        Self::load(&args.model, &args.place)
    }

    /// Loads a model for a place.
    pub(crate) fn load(name: &str, place: &PlaceArgs) -> Result<Self, Failure> {
        let target = choose_target(place)?;
        let model = model::load(name)?;
        let kv_capacity = kv_capacity(place.kv_capacity, &model.graph)?;
        let (name, named_target) = (name.to_owned(), place.target.clone());
        Ok(Self { model, target, kv_capacity, name, named_target, device: place.device })
    }

    /// The model's graph.
    pub(crate) fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// How programs are lowered here.
    pub(crate) fn lower_options(&self) -> lower::Options {
        lower::Options { kv_capacity: self.kv_capacity }
    }

    /// The GPU in a process of its own, which a search can lose, if it is wanted and there is one.
    pub(crate) fn open_process(
        &self,
        sharing: &SharingArgs,
    ) -> Result<Option<Remote<'_>>, Failure> {
        self.open_with(|info| open_process(self, info, sharing.shared_gpu, false))
    }

    /// The GPU of a number in a process of its own, which sees no other one.
    pub(crate) fn open_process_at(
        &self,
        ordinal: u32,
        sharing: &SharingArgs,
    ) -> Result<Remote<'_>, Failure> {
        let info = look_at(self, ordinal)
            .map_err(|error| Failure::missing(format!("capability missing: {error}")))?;
        open_process(self, &info, sharing.shared_gpu, true)
    }

    /// The GPU in this process, for what runs once, if it is wanted and there is one.
    pub(crate) fn open_here(&self) -> Result<Option<Gpu<'_>>, Failure> {
        self.open_with(|_| open_here(self))
    }

    /// The same to run one program once.
    pub(crate) fn open_once(&self) -> Result<Option<Gpu<'_>>, Failure> {
        self.open_with(|_| open_once(self))
    }

    /// Whether there is a GPU, and it is wanted.
    pub(crate) fn has_device(&self) -> Result<bool, Failure> {
        Ok(self.open_with(|_| Ok(()))?.is_some())
    }

    fn open_with<D>(
        &self,
        open: impl FnOnce(&vm_host::DeviceInfo) -> Result<D, Failure>,
    ) -> Result<Option<D>, Failure> {
        let wanted = match self.device {
            DeviceChoice::Cpu => return Ok(None),
            DeviceChoice::Eval => {
                let message =
                    "--device eval is for `generate` and `serve` only; use auto, cpu or cuda";
                return Err(Failure::usage(message));
            }
            DeviceChoice::Auto => false,
            DeviceChoice::Cuda => true,
        };
        match look(self) {
            Ok(info) => open(&info).map(Some),
            Err(error) if wanted => Err(Failure::missing(format!("capability missing: {error}"))),
            Err(_) => Ok(None),
        }
    }

    /// The kernel build of a kernel config: a hash of source, options and architecture.
    pub(crate) fn kernel_id(&self, kernel: &KernelConfig) -> String {
        self.kernel_id_of(kernel, 1)
    }

    /// The same of the build that runs so many sequences at once.
    pub(crate) fn kernel_id_of(&self, kernel: &KernelConfig, lanes: u32) -> String {
        let variant = vm_device::Variant { lanes, ..vm_host::variant(kernel, self.graph()) };
        vm_host::kernel_id(&variant, &self.target.arch)
    }

    /// The GPU's full name, if one is wanted and there.
    pub(crate) fn card(&self) -> Option<String> {
        let wanted = matches!(self.device, DeviceChoice::Auto | DeviceChoice::Cuda);
        wanted.then(|| look(self).ok().map(|info| info.name)).flatten()
    }

    /// The schedule that a config's missing knobs are taken from.
    pub(crate) fn default_config(&self) -> ScheduleConfig {
        ir::schedule::default_config(self.graph(), &self.target)
    }

    /// The named start of studies.
    pub(crate) fn neutral_config(&self) -> ScheduleConfig {
        ir::schedule::neutral_config(self.graph(), &self.target)
    }

    /// The schedule of a config. The inner error is a gate's no; unreadable files fail outright.
    pub(crate) fn config(
        &self,
        source: &ConfigSource,
    ) -> Result<Result<ScheduleConfig, Violations>, Failure> {
        let text = source.text()?;
        match ir::schedule::read_config(&text, self.graph(), &self.target) {
            Ok(valid) => Ok(Ok(*valid)),
            Err(violations) if violations.has(Rule::SJson) => Err(Failure::usage(format!(
                "{source}: {violations}; a config is a JSON object such as {{\"pipeline\": {{\"stages\": 8}}}}"
            ))),
            Err(violations) => Ok(Err(violations)),
        }
    }

    /// The schedule of a config, for the commands that have no verdict to put violations into.
    pub(crate) fn valid_config(&self, source: &ConfigSource) -> Result<ScheduleConfig, Failure> {
        self.config(source)?
            .map_err(|violations| Failure::refused(format!("{source}: {violations}")))
    }
}

/// Tokens of the key/value cache: those asked for, if the model has as many positions.
pub(crate) fn kv_capacity(asked: Option<u32>, graph: &Graph) -> Result<u32, Failure> {
    let most = graph.max_positions.clamp(1, abi::KV_CAPACITY_MAX);
    match asked {
        None => Ok(most.min(DEFAULT_KV_CAPACITY)),
        Some(tokens) if (1..=most).contains(&tokens) => Ok(tokens),
        Some(tokens) => Err(Failure::usage(format!(
            "--kv-capacity {tokens} is out of range: {} takes 1 to {most}",
            graph.name
        ))),
    }
}

fn choose_target(place: &PlaceArgs) -> Result<Target, Failure> {
    if let Some(name) = &place.target {
        let named = Target::by_name(name).map_err(|error| Failure::usage(error.to_string()))?;
        // Cards of one name differ in size: the one that is here is what it is.
        let here = (place.device != DeviceChoice::Cpu).then(live_target).flatten();
        return Ok(here.filter(|here| here.name == named.name).unwrap_or(named));
    }
    if place.device != DeviceChoice::Cpu
        && let Some(target) = live_target()
    {
        return Ok(target);
    }
    Target::by_name(DEFAULT_TARGET).map_err(|error| Failure::usage(error.to_string()))
}
