//! Kernels: loading them, and launching one with its parameters.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use super::table::Opaque;
use super::{Context, DriverError, Stream, call};

const MAX_DYNAMIC_SHARED: i32 = 8;
/// No code for the GPU in the image; PTX that the driver can't compile, or is too old for.
const NO_BINARY: [i32; 4] = [209, 218, 221, 222];

/// Compiled kernels on a GPU.
#[derive(Clone)]
pub struct Module(Arc<Loaded>);

struct Loaded {
    context: Context,
    raw: Opaque,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Loaded {}

/// How many blocks of how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
}

impl Grid {
    /// At least `count` threads in a row, in blocks of `threads`.
    pub fn threads(count: usize, threads: u32) -> Grid {
        Grid { blocks: [count.div_ceil(threads as usize) as u32, 1, 1], threads }
    }
}

impl Module {
    /// Loads a fat binary.
    pub fn new(context: &Context, image: &[u8]) -> Result<Module, DriverError> {
        // The driver wants its header aligned.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is whole, a fat binary knows its length, and the driver copies what it needs.
        match unsafe { (context.table().module_load)(&mut raw, aligned.as_ptr().cast()) } {
            0 => {}
            code if NO_BINARY.contains(&code) => {
                let (capability, reason) = (context.device().capability, context.table().describe(code));
                return Err(DriverError::NoBinary { capability, reason });
            }
            code => return Err(DriverError::of(context.table(), "module_load", code)),
        }
        Ok(Module(Arc::new(Loaded { context: context.clone(), raw })))
    }

    /// A kernel by its name, which takes one `P`. If it wants dynamic shared memory, a variable `NAME_shared` beside it says how many bytes.
    ///
    /// # Panics
    /// If its parameter has another size than `P`: this crate and its kernels disagree.
    pub fn kernel<P: Copy>(&self, name: &str) -> Result<Kernel<P>, DriverError> {
        let table = self.0.context.table();
        let symbol = |name: String| CString::new(name).expect("names of kernels have no zeros");
        let (function, variable) = (symbol(name.to_owned()), symbol(format!("{name}_shared")));
        let (mut raw, mut at) = (std::ptr::null_mut(), 0);
        let (mut offset, mut size, mut len) = (0, size_of::<P>(), 0);
        let mut shared = 0u32;
        // SAFETY: the module is alive; the calls write a handle, sizes, an address, and the four bytes of `shared`.
        unsafe {
            call!(table, module_function(&mut raw, self.0.raw, function.as_ptr()))?;
            call!(table, function_parameter(raw, 0, &mut offset, &mut size))?;
            if (table.module_variable)(&mut at, &mut len, self.0.raw, variable.as_ptr()) == 0 {
                call!(table, read(std::ptr::from_mut(&mut shared).cast(), at, size_of::<u32>()))?;
                call!(table, function_set(raw, MAX_DYNAMIC_SHARED, shared as i32))?;
            }
        }
        assert_eq!(size, size_of::<P>(), "the parameter of {name}");
        Ok(Kernel { module: self.clone(), raw, shared, of: PhantomData })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded in `new`; no kernel of it is left, for each holds this.
        unsafe { (self.context.table().module_unload)(self.raw) };
    }
}

/// A kernel that takes one `P` by value.
pub struct Kernel<P> {
    /// Keeps the code.
    module: Module,
    raw: Opaque,
    shared: u32,
    of: PhantomData<fn(P)>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl<P> Send for Kernel<P> {}

impl<P: Copy> Kernel<P> {
    /// Queues a launch. Nothing is launched for a grid without blocks.
    ///
    /// # Safety
    /// Every address in `parameters` leads to as much device memory as the kernel reads and writes for these sizes, alive until it is done,
    /// and no other queued work touches what it writes.
    pub unsafe fn launch(&self, stream: &Stream, grid: Grid, parameters: &P) -> Result<(), DriverError> {
        let [x, y, z] = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the size that the kernel was found to take, copied by the driver; the rest is the caller's.
        unsafe {
            call!(
                self.module.0.context.table(),
                launch(
                    self.raw,
                    x,
                    y,
                    z,
                    grid.threads,
                    1,
                    1,
                    self.shared,
                    stream.raw(),
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }
}
