//! The NVRTC library: which one is loaded, and the calls that we make. Bound here because cudarc takes any `libnvrtc.so` of
//! the dynamic loader's path before the one that `AMK_NVRTC` names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;

use crate::error::HostError;

/// The library's name, with the major version whose calls are bound here.
const LIBRARY: &str = "libnvrtc.so.13";

type Handle = *mut c_void;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Read = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

/// What is read of a compiled program.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    Cubin,
    Ptx,
}

/// The calls of one library, which stays loaded for the life of the process.
pub(crate) struct Nvrtc {
    file: PathBuf,
    version: (i32, i32),
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: Create,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    log: (Size, Read),
    cubin: (Size, Read),
    ptx: (Size, Read),
}

impl Nvrtc {
    /// The first library of [`folders`], else of the dynamic loader's path, loaded once.
    pub(crate) fn get() -> Result<&'static Self, HostError> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(|why| HostError::NoNvrtc(why.clone()))
    }

    fn load() -> Result<Self, String> {
        let folders = match std::env::var_os("AMK_NVRTC") {
            Some(folder) => vec![PathBuf::from(folder)],
            None => folders(),
        };
        let mut tried: Vec<String> = Vec::new();
        for folder in &folders {
            let file = folder.join(LIBRARY);
            if !file.is_file() {
                tried.push(folder.display().to_string());
                continue;
            }
            open_builtins(folder);
            match Self::open(&file) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(error) => tried.push(format!("{}: {error}", file.display())),
            }
        }
        if std::env::var_os("AMK_NVRTC").is_none() {
            if let Ok(nvrtc) = Self::open(Path::new(LIBRARY)) {
                return Ok(nvrtc);
            }
            tried.push("the dynamic loader's path".to_owned());
        }
        Err(tried.join(", "))
    }

    fn open(file: &Path) -> Result<Self, libloading::Error> {
        // Leaked, so that no function below outlives it.
        let library: &'static Library = Box::leak(Box::new(open(file)?));
        // SAFETY: the types are those of nvrtc.h of CUDA 13, whose library this is by its name.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                *library.get(b"nvrtcVersion")?;
            let (mut major, mut minor) = (0, 0);
            version(&raw mut major, &raw mut minor);
            Ok(Self {
                file: file.to_owned(),
                version: (major, minor),
                error_string: *library.get(b"nvrtcGetErrorString")?,
                create: *library.get(b"nvrtcCreateProgram")?,
                compile: *library.get(b"nvrtcCompileProgram")?,
                destroy: *library.get(b"nvrtcDestroyProgram")?,
                log: (
                    *library.get(b"nvrtcGetProgramLogSize")?,
                    *library.get(b"nvrtcGetProgramLog")?,
                ),
                cubin: (*library.get(b"nvrtcGetCUBINSize")?, *library.get(b"nvrtcGetCUBIN")?),
                ptx: (*library.get(b"nvrtcGetPTXSize")?, *library.get(b"nvrtcGetPTX")?),
            })
        }
    }

    /// Major and minor version.
    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles, and returns the output and the compiler's log.
    pub(crate) fn compile(
        &self,
        source: &str,
        options: &[String],
        output: Output,
    ) -> Result<(Vec<u8>, String), HostError> {
        let no_nul = |_| HostError::Compile("the source or an option holds a NUL byte".into());
        let source = CString::new(source).map_err(no_nul)?;
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<Result<_, _>>()
            .map_err(no_nul)?;
        let program = Program::new(self, &source)?;
        let compiled = program.compile(&options);
        let log = text(program.read("nvrtcGetProgramLog", self.log).unwrap_or_default());
        if compiled.is_err() && !log.is_empty() {
            return Err(HostError::Compile(log));
        }
        compiled?;
        let image = match output {
            Output::Cubin => program.read("nvrtcGetCUBIN", self.cubin)?,
            Output::Ptx => text(program.read("nvrtcGetPTX", self.ptx)?).into_bytes(),
        };
        Ok((image, log))
    }

    fn called(&self, call: &'static str, code: c_int) -> Result<(), HostError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static string for every number.
        let message = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(HostError::Driver { call, message: message.to_string_lossy().into_owned() })
    }
}

/// A program of the library, freed when dropped.
struct Program<'n> {
    nvrtc: &'n Nvrtc,
    handle: Handle,
}

impl<'n> Program<'n> {
    fn new(nvrtc: &'n Nvrtc, source: &CStr) -> Result<Self, HostError> {
        let mut handle = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: the strings end with NUL and live through the call; there are no headers.
        let code = unsafe {
            (nvrtc.create)(
                &raw mut handle,
                source.as_ptr(),
                c"megakernel.cu".as_ptr(),
                0,
                none,
                none,
            )
        };
        nvrtc.called("nvrtcCreateProgram", code)?;
        Ok(Self { nvrtc, handle })
    }

    fn compile(&self, options: &[CString]) -> Result<(), HostError> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program is live, and the strings behind the pointers outlive the call.
        let code = unsafe { (self.nvrtc.compile)(self.handle, count, options.as_ptr()) };
        self.nvrtc.called("nvrtcCompileProgram", code)
    }

    fn read(
        &self,
        call: &'static str,
        (size_of, read): (Size, Read),
    ) -> Result<Vec<u8>, HostError> {
        let mut size = 0;
        // SAFETY: the program is live.
        self.nvrtc.called(call, unsafe { size_of(self.handle, &raw mut size) })?;
        let mut bytes = vec![0_u8; size];
        // SAFETY: the program is live, and the buffer has the size that the library asked for.
        self.nvrtc.called(call, unsafe { read(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live and not used after. Failing to free it is not failing to compile.
        unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
    }
}

/// A string of the library without the NUL at its end.
fn text(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn open(file: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: NVRTC's initialisers have no preconditions.
    unsafe { Library::new(file) }
}

/// Opens the folder's `libnvrtc-builtins` for the life of the process: libnvrtc asks for it by name and has no run path.
fn open_builtins(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"libnvrtc-builtins.so.")
            && let Ok(library) = open(&entry.path())
        {
            std::mem::forget(library);
        }
    }
}

/// NVRTC's version.
///
/// # Errors
/// If NVRTC is missing.
pub fn nvrtc_version() -> Result<(i32, i32), HostError> {
    Nvrtc::get().map(Nvrtc::version)
}

/// The library that compiles; its name alone, if the dynamic loader found it.
///
/// # Errors
/// If NVRTC is missing.
pub fn nvrtc_file() -> Result<&'static Path, HostError> {
    Nvrtc::get().map(|nvrtc| nvrtc.file.as_path())
}

/// Folders that may hold NVRTC, most explicit first.
pub(crate) fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::env::var_os("AMK_NVRTC").map(PathBuf::from).into_iter().collect();
    let program = std::env::current_exe().ok();
    folders
        .extend(program.as_deref().and_then(lib_beside).iter().flat_map(|lib| python_folders(lib)));
    folders.push("/usr/local/cuda/lib64".into());
    let lib = std::env::var_os("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("lib"));
    folders.extend(lib.iter().flat_map(|lib| python_folders(lib)));
    folders
}

/// The `lib` of the environment that a program is installed in, as `PREFIX/bin/amk`: pip installs what the program needs
/// there too.
fn lib_beside(program: &Path) -> Option<PathBuf> {
    let bin = program.parent().filter(|folder| folder.ends_with("bin"))?;
    Some(bin.parent()?.join("lib"))
}

/// Where `pip install nvidia-cuda-nvrtc` puts NVRTC below the `lib` of a virtual environment, whose folder has the
/// version of Python in its name.
fn python_folders(lib: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let pythons =
        entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"python"));
    // Debian's Python installs outside of an environment into `dist-packages`.
    let packages = ["site-packages", "dist-packages"];
    let folders = pythons.flat_map(|entry| {
        packages.map(|packages| entry.path().join(packages).join("nvidia/cu13/lib"))
    });
    let mut found: Vec<PathBuf> = folders.filter(|folder| folder.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvrtc_is_found_in_a_virtual_environment_of_any_python() {
        let folder = tempfile::tempdir().unwrap();
        let has = |name: &str| folder.path().join(name).join("site-packages/nvidia/cu13/lib");
        for name in ["python3.11", "python3.13", "pkgconfig"] {
            std::fs::create_dir_all(has(name)).unwrap();
        }
        std::fs::create_dir_all(folder.path().join("python3.9")).unwrap();
        assert_eq!(python_folders(folder.path()), [has("python3.11"), has("python3.13")]);
        assert_eq!(python_folders(&folder.path().join("none")), Vec::<PathBuf>::new());
        // A wheel's program: what pip installed beside it is found without any variable.
        let program = folder.path().join("bin/amk");
        assert_eq!(lib_beside(&program), Some(folder.path().join("lib")));
        assert_eq!(lib_beside(Path::new("/repository/target/debug/amk")), None);
    }
}
