//! Kernels: loading them, and launching one with its parameters.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use super::table::{LaunchAttribute, LaunchConfig, Opaque};
use super::{Context, DriverError, Stream, call};

const MAX_THREADS: i32 = 0;
const STATIC_SHARED: i32 = 1;
const CODE_OF: i32 = 5;
const MAX_DYNAMIC_SHARED: i32 = 8;
const PREFERRED_SHARED: i32 = 9;
/// The virtual architecture from which on a kernel's code waits by itself for the one in front: `ready()` in `kernels/contract.cuh`.
const WAITS: i32 = 90;
/// The kernel may start while the one in front of it in its stream still runs.
static EARLY: LaunchAttribute = LaunchAttribute { id: 6, value: [1, 0, 0, 0, 0, 0, 0, 0] };
/// There is no such name.
const NOT_FOUND: i32 = 500;
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
        let (mut shared, mut threads, mut code) = (0u32, 0, 0);
        // SAFETY: the module is alive; the calls write a handle, sizes, an address, and the four bytes of `shared`.
        unsafe {
            call!(table, module_function(&mut raw, self.0.raw, function.as_ptr()))?;
            call!(table, function_parameter(raw, 0, &mut offset, &mut size))?;
            // All kernels want as much shared memory as there is: a multiprocessor that has to divide its first-level cache anew between two
            // kernels can't run both at once (docs/experiments.md).
            call!(table, function_set(raw, PREFERRED_SHARED, 100))?;
            call!(table, function_get(&mut threads, MAX_THREADS, raw))?;
            call!(table, function_get(&mut code, CODE_OF, raw))?;
            match (table.module_variable)(&mut at, &mut len, self.0.raw, variable.as_ptr()) {
                0 => {
                    call!(table, read(std::ptr::from_mut(&mut shared).cast(), at, size_of::<u32>()))?;
                    call!(table, function_set(raw, MAX_DYNAMIC_SHARED, shared as i32))?;
                }
                NOT_FOUND => {}
                code => return Err(DriverError::of(table, "module_variable", code)),
            }
        }
        assert_eq!(size, size_of::<P>(), "the parameter of {name}");
        Ok(Kernel {
            module: self.clone(),
            raw,
            shared,
            threads: threads as u32,
            waits: code >= WAITS,
            early: false,
            of: PhantomData,
        })
    }

    /// A kernel that is told at every launch how much shared memory its blocks have.
    pub fn dynamic_kernel<P: Copy>(&self, name: &str) -> Result<Kernel<P>, DriverError> {
        let kernel = self.kernel(name)?;
        let (context, raw) = (&self.0.context, kernel.raw);
        let mut fixed = 0;
        // SAFETY: the function is this module's.
        unsafe {
            call!(context.table(), function_get(&mut fixed, STATIC_SHARED, raw))?;
            let most = context.device().shared_memory as i32 - fixed;
            call!(context.table(), function_set(raw, MAX_DYNAMIC_SHARED, most))?;
        }
        Ok(kernel)
    }

    /// Words that a module has beside its kernels.
    pub fn words<const N: usize>(&self, name: &str) -> Result<[u32; N], DriverError> {
        let table = self.0.context.table();
        let name = CString::new(name).expect("names have no zeros");
        let mut words = [0; N];
        let (mut at, mut len) = (0, size_of_val(&words));
        // SAFETY: the module is alive; the calls write an address, a length, and as many bytes as the words have.
        unsafe {
            call!(table, module_variable(&mut at, &mut len, self.0.raw, name.as_ptr()))?;
            assert_eq!(len, size_of_val(&words), "the words {name:?}");
            call!(table, read(words.as_mut_ptr().cast(), at, len))?;
        }
        Ok(words)
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
    waits: bool,
    early: bool,
    threads: u32,
    of: PhantomData<fn(P)>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl<P> Send for Kernel<P> {}

impl<P: Copy> Kernel<P> {
    /// Has it start while kernels in front of it still run, on GPUs that can, if its code knows of that: code of an older architecture,
    /// which the driver compiled for this GPU, doesn't. Before the kernel calls `ready()` it writes nothing, and reads nothing that a kernel
    /// writes which may still run.
    pub fn early(self) -> Kernel<P> {
        Kernel { early: self.waits, ..self }
    }

    /// The most threads of a block: as many as it was compiled for.
    pub fn max_threads(&self) -> u32 {
        self.threads
    }

    /// Queues a launch. Nothing is launched for a grid without blocks.
    ///
    /// # Safety
    /// Every address in `parameters` leads to as much device memory as the kernel reads and writes for these sizes, alive until it is done,
    /// and no other queued work touches what it writes.
    pub unsafe fn launch(&self, stream: &Stream, grid: Grid, parameters: &P) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        unsafe { self.launch_with(stream, grid, self.shared, parameters) }
    }

    /// The same with so many bytes of shared memory a block.
    ///
    /// # Safety
    /// As for `launch`; and so many bytes are what the kernel lays out for these parameters.
    pub unsafe fn launch_with(
        &self,
        stream: &Stream,
        grid: Grid,
        shared: u32,
        parameters: &P,
    ) -> Result<(), DriverError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let config = LaunchConfig {
            blocks: grid.blocks,
            threads: [grid.threads, 1, 1],
            shared,
            stream: stream.raw(),
            attributes: &EARLY,
            count: u32::from(self.early),
        };
        let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the size that the kernel was found to take, copied by the driver; the rest is the caller's.
        unsafe {
            call!(
                self.module.0.context.table(),
                launch(&config, self.raw, arguments.as_mut_ptr(), std::ptr::null_mut())
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Device, fake};
    use super::*;

    /// Oracle: which code has the instruction that waits.
    #[test]
    fn only_code_that_waits_starts_early() {
        for (code, early) in [(75, false), (89, false), (90, true), (120, true)] {
            fake::install();
            fake::with(|state| state.code = code);
            let context = Context::new(&Device::all().unwrap()[0]).unwrap();
            let kernel = Module::new(&context, &[]).unwrap().kernel::<u64>("strata_write").unwrap();
            assert!(!kernel.early && kernel.early().early == early, "{code}");
        }
    }
}
