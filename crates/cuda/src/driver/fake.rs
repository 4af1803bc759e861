//! A driver without a GPU, for tests of what happens when calls fail: memory is addresses, kernels compute nothing, and the call of a
//! certain number fails, alone or with all that follow it.
//!
//! Each thread that asks has its own. Objects are counted, so that whatever fails, nothing may be left over or given back twice.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::NoDriver;
use super::table::{Code, DevicePtr, Opaque, RawDevice, Table, start};

thread_local! {
    static TABLE: Cell<Option<&'static Table>> = const { Cell::new(None) };
    static REFUSED: RefCell<Option<NoDriver>> = const { RefCell::new(None) };
    static STATE: RefCell<State> = RefCell::default();
}

/// What a thread's driver was asked, and when it fails.
#[derive(Default)]
pub(crate) struct State {
    /// Calls so far.
    pub(crate) calls: u64,
    /// The call that fails, counted from 1, with what code, and whether all after it do.
    pub(crate) fails: Option<(u64, Code, bool)>,
    /// An entry point that always fails.
    pub(crate) refuses: Option<(&'static str, Code)>,
    /// The entry point that failed first.
    pub(crate) failed: Option<&'static str>,
    /// Bytes that are free.
    pub(crate) free: usize,
    /// The architecture that kernels were compiled for.
    pub(crate) code: c_int,
    /// Device allocations by address.
    device: BTreeMap<DevicePtr, usize>,
    next: DevicePtr,
    pinned: BTreeMap<usize, Box<[u64]>>,
    /// Values of eight bytes that were copied to the device one by one: the latest of each address.
    pub(crate) words: BTreeMap<DevicePtr, u64>,
    /// Copies to the device and back: to, from, and how many bytes.
    pub(crate) copies: Vec<(u64, u64, usize)>,
    /// Objects that are alive.
    objects: i64,
}

const TOTAL: usize = 16 << 30;

/// The fake of this thread from now on, as a machine with one GPU that has nothing on it.
pub(crate) fn install() {
    let mut table = Table::silent();
    table.error_name = error_name;
    table.error_text = error_text;
    table.device_count = device_count;
    table.device_memory = device_memory;
    table.device_attribute = device_attribute;
    table.function_get = function_get;
    table.device_name = text;
    table.device_bus = text;
    table.memory_info = memory_info;
    table.allocate = allocate;
    table.free = free;
    table.allocate_host = allocate_host;
    table.free_host = free_host;
    table.register_host = register_host;
    table.unregister_host = unregister_host;
    table.host_address = host_address;
    table.copy_to_device = copy_to_device;
    table.copy_to_host = copy_to_host;
    table.context_retain = context_retain;
    table.context_release = context_release;
    table.stream_create = create;
    table.event_create = create;
    table.stream_destroy = destroy;
    table.event_destroy = destroy;
    table.graph_exec_destroy = destroy;
    table.graph_instantiate = graph_instantiate;
    table.module_load = module_load;
    table.module_unload = destroy;
    STATE.with_borrow_mut(|state| {
        let (fails, refuses) = (state.fails.take(), state.refuses.take());
        *state = State { free: TOTAL, next: 1 << 40, fails, refuses, ..State::default() };
    });
    match start(table) {
        Ok(table) => TABLE.set(Some(Box::leak(Box::new(table)))),
        Err(refused) => REFUSED.set(Some(refused)),
    }
}

/// Looks at the state, or changes it.
pub(crate) fn with<T>(look: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(look)
}

impl State {
    /// Device allocations, pinned ones, and objects that are alive.
    pub(crate) fn alive(&self) -> (usize, usize, i64) {
        (self.device.len(), self.pinned.len(), self.objects)
    }
}

/// The thread's driver, if it has one.
pub(super) fn table() -> Option<Result<&'static Table, NoDriver>> {
    let refused = REFUSED.with_borrow(Clone::clone).map(Err);
    refused.or_else(|| TABLE.get().map(Ok))
}

/// What a call answers.
pub(super) fn answer(name: &'static str) -> Code {
    STATE.with_borrow_mut(|state| {
        state.calls += 1;
        let code = match (state.fails, state.refuses) {
            (Some((at, code, lasting)), _) if state.calls == at || (lasting && state.calls > at) => code,
            (_, Some((refused, code))) if refused == name => code,
            _ => return 0,
        };
        state.failed.get_or_insert(name);
        code
    })
}

unsafe extern "C" fn error_name(code: Code, to: *mut *const c_char) -> Code {
    let name: &CStr = match code {
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        209 => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => return 1,
    };
    // SAFETY: the caller gives room for a pointer.
    unsafe { *to = name.as_ptr() };
    0
}

unsafe extern "C" fn error_text(_: Code, to: *mut *const c_char) -> Code {
    // SAFETY: as above.
    unsafe { *to = c"a made-up error".as_ptr() };
    0
}

/// Writes one value, unless the call fails.
///
/// # Safety
/// `to` is writable.
unsafe fn give<T>(name: &'static str, to: *mut T, value: impl FnOnce(&mut State) -> T) -> Code {
    let code = answer(name);
    if code == 0 {
        // SAFETY: the caller's.
        unsafe { to.write(with(value)) };
    }
    code
}

unsafe extern "C" fn device_count(to: *mut c_int) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("device_count", to, |_| 1) }
}

unsafe extern "C" fn device_memory(to: *mut usize, _: RawDevice) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("device_memory", to, |_| TOTAL) }
}

unsafe extern "C" fn device_attribute(to: *mut c_int, which: c_int, _: RawDevice) -> Code {
    // Multiprocessors, and the shared memory of a block: launches are divided by these.
    let value = match which {
        16 => 8,
        97 => 99 << 10,
        _ => 0,
    };
    // SAFETY: the driver's contract.
    unsafe { give("device_attribute", to, |_| value) }
}

unsafe extern "C" fn function_get(to: *mut c_int, which: c_int, _: Opaque) -> Code {
    // The architecture of a kernel's code.
    let value = if which == 5 { with(|state| state.code) } else { 0 };
    // SAFETY: the driver's contract.
    unsafe { give("function_get", to, |_| value) }
}

unsafe extern "C" fn text(to: *mut c_char, _: c_int, _: RawDevice) -> Code {
    // SAFETY: the driver's contract: there is room for more than one byte.
    unsafe { give("device_name", to, |_| 0) }
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("memory_info", free, |state| state.free) | give("memory_info", total, |_| TOTAL) }
}

unsafe extern "C" fn allocate(to: *mut DevicePtr, bytes: usize) -> Code {
    if with(|state| state.free < bytes) {
        return 2;
    }
    // SAFETY: the driver's contract.
    unsafe {
        give("allocate", to, |state| {
            let at = state.next;
            state.next += bytes.next_multiple_of(512) as DevicePtr;
            state.free -= bytes;
            state.device.insert(at, bytes);
            at
        })
    }
}

unsafe extern "C" fn free(at: DevicePtr) -> Code {
    with(|state| state.free += state.device.remove(&at).expect("an allocation that is alive"));
    answer("free")
}

unsafe extern "C" fn allocate_host(to: *mut *mut c_void, bytes: usize, _: c_uint) -> Code {
    // SAFETY: the driver's contract.
    unsafe {
        give("allocate_host", to, |state| {
            let mut memory = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
            let at = memory.as_mut_ptr();
            state.pinned.insert(at as usize, memory);
            at.cast()
        })
    }
}

unsafe extern "C" fn free_host(at: *mut c_void) -> Code {
    with(|state| drop(state.pinned.remove(&(at as usize)).expect("an allocation that is alive")));
    answer("free_host")
}

unsafe extern "C" fn register_host(_: *mut c_void, _: usize, _: c_uint) -> Code {
    let code = answer("register_host");
    with(|state| state.objects += i64::from(code == 0));
    code
}

unsafe extern "C" fn unregister_host(_: *mut c_void) -> Code {
    with(|state| state.objects -= 1);
    answer("unregister_host")
}

unsafe extern "C" fn host_address(to: *mut DevicePtr, at: *mut c_void, _: c_uint) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("host_address", to, |_| at as DevicePtr) }
}

unsafe extern "C" fn copy_to_device(to: DevicePtr, from: *const c_void, bytes: usize, _: Opaque) -> Code {
    let code = answer("copy_to_device");
    if code == 0 {
        with(|state| state.copies.push((to, from as u64, bytes)));
    }
    if code == 0 && bytes == 8 {
        // SAFETY: the caller gives so many bytes.
        let word = unsafe { from.cast::<u64>().read_unaligned() };
        with(|state| state.words.insert(to, word));
    }
    code
}

/// Most copies write nothing: buffers hold zeros, or what was there. Very short ones are the ranks of a row's largest value, which must be of
/// an index that exists: 1.0 at index 1.
unsafe extern "C" fn copy_to_host(to: *mut c_void, from: DevicePtr, bytes: usize, _: Opaque) -> Code {
    let code = answer("copy_to_host");
    if code == 0 {
        with(|state| state.copies.push((to as u64, from, bytes)));
    }
    if code == 0 && bytes <= 16 {
        let ranks = [0xbf80_0000_ffff_fffe_u64; 2];
        // SAFETY: the caller gives room for so many bytes.
        unsafe { to.cast::<u8>().copy_from(ranks.as_ptr().cast(), bytes) };
    }
    code
}

fn made(state: &mut State) -> Opaque {
    state.objects += 1;
    std::ptr::dangling_mut::<u64>().cast()
}

unsafe extern "C" fn create(to: *mut Opaque, _: c_uint) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("stream_create", to, made) }
}

unsafe extern "C" fn module_load(to: *mut Opaque, _: *const c_void) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("module_load", to, made) }
}

unsafe extern "C" fn graph_instantiate(to: *mut Opaque, _: Opaque, _: u64) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("graph_instantiate", to, made) }
}

unsafe extern "C" fn context_retain(to: *mut Opaque, _: RawDevice) -> Code {
    // SAFETY: the driver's contract.
    unsafe { give("context_retain", to, made) }
}

unsafe extern "C" fn destroy(_: Opaque) -> Code {
    with(|state| state.objects -= 1);
    answer("destroy")
}

unsafe extern "C" fn context_release(_: RawDevice) -> Code {
    with(|state| state.objects -= 1);
    answer("context_release")
}
