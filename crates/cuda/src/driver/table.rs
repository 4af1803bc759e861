//! The driver's library, loaded at run time, and the entry points that are used.
//!
//! Owns every symbol. They are looked up once, all of them, so that a driver that lacks one is refused with a sentence instead of
//! failing in the middle of a token; and they return plain integers, because a newer driver may answer with codes that no
//! enum has. Nothing here knows what a call means: that is the neighbours' part.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// A device's number.
pub(super) type RawDevice = c_int;
/// Opaque objects of the driver.
pub(super) type Opaque = *mut c_void;
/// An address in device memory.
pub(super) type DevicePtr = u64;
/// What every call returns; 0 is success.
pub(super) type Code = c_int;

/// How a kernel is launched: the driver's `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) blocks: [c_uint; 3],
    pub(super) threads: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: Opaque,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) count: c_uint,
}

/// The driver's `CUlaunchAttribute`.
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub(super) id: u64,
    pub(super) value: [u64; 8],
}

/// Why there is no driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDriver {
    /// The library isn't there.
    #[error("there is no NVIDIA driver here ({0})")]
    Missing(String),
    /// An entry point isn't there.
    #[error("the NVIDIA driver is too old: it has no {0}; CUDA 12.4 (driver 550) or later is needed")]
    TooOld(&'static str),
    /// It shows nothing to compute with.
    #[error("the NVIDIA driver shows no GPU")]
    NoDevice,
    /// It is there but doesn't start.
    #[error("the NVIDIA driver does not start: {0}")]
    Broken(String),
}

macro_rules! entry_points {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The entry points.
        pub(super) struct Table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Keeps the code that the pointers above lead to.
            _library: Option<Library>,
        }

        impl Table {
            /// The driver's name of an entry point.
            pub(super) fn symbol(field: &str) -> &'static str {
                match field {
                    $(stringify!($field) => $symbol,)*
                    _ => "a call",
                }
            }

            /// A driver without a GPU: every call answers what [`super::fake::answer`] says, and writes nothing.
            #[cfg(test)]
            pub(super) fn silent() -> Table {
                $(unsafe extern "C" fn $field($(_: $argument),*) -> Code {
                    super::fake::answer(stringify!($field))
                })*
                Table { $($field,)* _library: None }
            }

            fn open() -> Result<Table, NoDriver> {
                #[cfg(windows)]
                const NAMES: [&str; 1] = ["nvcuda.dll"];
                #[cfg(not(windows))]
                const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
                let mut refused = String::new();
                for name in NAMES {
                    // SAFETY: loading the driver runs its initialisers, which is what every CUDA program does.
                    match unsafe { Library::new(name) } {
                        Ok(library) => return Ok(Table {
                            $(// SAFETY: each signature is the one that the driver API documents for its symbol.
                            $field: *unsafe { library.get($symbol.as_bytes()) }.map_err(|_| NoDriver::TooOld($symbol))?,)*
                            _library: Some(library),
                        }),
                        Err(error) if refused.is_empty() => refused = error.to_string(),
                        Err(_) => {}
                    }
                }
                Err(NoDriver::Missing(refused))
            }
        }
    };
}

entry_points! {
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    error_text = "cuGetErrorString" (Code, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut RawDevice, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, RawDevice);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, RawDevice);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, RawDevice);
    device_bus = "cuDeviceGetPCIBusId" (*mut c_char, c_int, RawDevice);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Opaque, RawDevice);
    context_release = "cuDevicePrimaryCtxRelease_v2" (RawDevice);
    context_flags = "cuDevicePrimaryCtxSetFlags_v2" (RawDevice, c_uint);
    context_set = "cuCtxSetCurrent" (Opaque);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2" (*mut DevicePtr, usize);
    free = "cuMemFree_v2" (DevicePtr);
    allocate_host = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost" (*mut c_void);
    register_host = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unregister_host = "cuMemHostUnregister" (*mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (*mut DevicePtr, *mut c_void, c_uint);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Opaque);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Opaque);
    copy_on_device = "cuMemcpyDtoDAsync_v2" (DevicePtr, DevicePtr, usize, Opaque);
    read = "cuMemcpyDtoH_v2" (*mut c_void, DevicePtr, usize);
    fill = "cuMemsetD8Async" (DevicePtr, u8, usize, Opaque);
    stream_create = "cuStreamCreate" (*mut Opaque, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (Opaque);
    stream_query = "cuStreamQuery" (Opaque);
    stream_wait = "cuStreamWaitEvent" (Opaque, Opaque, c_uint);
    capture_begin = "cuStreamBeginCapture_v2" (Opaque, c_int);
    capture_end = "cuStreamEndCapture" (Opaque, *mut Opaque);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut Opaque, Opaque, u64);
    graph_launch = "cuGraphLaunch" (Opaque, Opaque);
    graph_destroy = "cuGraphDestroy" (Opaque);
    graph_exec_destroy = "cuGraphExecDestroy" (Opaque);
    event_create = "cuEventCreate" (*mut Opaque, c_uint);
    event_destroy = "cuEventDestroy_v2" (Opaque);
    event_record = "cuEventRecord" (Opaque, Opaque);
    event_query = "cuEventQuery" (Opaque);
    event_elapsed = "cuEventElapsedTime" (*mut f32, Opaque, Opaque);
    module_load = "cuModuleLoadData" (*mut Opaque, *const c_void);
    module_unload = "cuModuleUnload" (Opaque);
    module_function = "cuModuleGetFunction" (*mut Opaque, Opaque, *const c_char);
    module_variable = "cuModuleGetGlobal_v2" (*mut DevicePtr, *mut usize, Opaque, *const c_char);
    function_parameter = "cuFuncGetParamInfo" (Opaque, usize, *mut usize, *mut usize);
    function_get = "cuFuncGetAttribute" (*mut c_int, c_int, Opaque);
    function_set = "cuFuncSetAttribute" (Opaque, c_int, c_int);
    launch = "cuLaunchKernelEx" (*const LaunchConfig, Opaque, *mut *mut c_void, *mut *mut c_void);
}

/// The driver, loaded and started the first time that somebody asks.
pub(super) fn table() -> Result<&'static Table, NoDriver> {
    static TABLE: OnceLock<Result<Table, NoDriver>> = OnceLock::new();
    #[cfg(test)]
    if let Some(fake) = super::fake::table() {
        return fake;
    }
    let table = TABLE.get_or_init(|| start(Table::open()?));
    table.as_ref().map_err(Clone::clone)
}

const NO_DEVICE: Code = 100;

/// Starts a driver.
pub(super) fn start(table: Table) -> Result<Table, NoDriver> {
    // SAFETY: the first call of all; 0 is the only flag there is.
    match unsafe { (table.init)(0) } {
        0 => Ok(table),
        NO_DEVICE => Err(NoDriver::NoDevice),
        code => Err(NoDriver::Broken(table.describe(code))),
    }
}

impl Table {
    /// A code in the driver's words.
    pub(super) fn describe(&self, code: Code) -> String {
        let word = |get: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: the driver writes a pointer to a string of its own, or leaves null for a code it does not know.
            let found = unsafe { get(code, &mut text) } == 0 && !text.is_null();
            // SAFETY: such strings end with a zero and live as long as the library.
            found.then(|| unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (word(self.error_name), word(self.error_text)) {
            (Some(name), Some(text)) => format!("{text} ({name})"),
            _ => format!("error {code}"),
        }
    }
}
