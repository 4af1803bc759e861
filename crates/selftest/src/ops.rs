//! Single ops over weights: products of every block format, decoding, and the quantisation of their inputs. The oracle is `strata-quant`.

use strata_backend::{Adjustment, Largest, LogitRow};
use strata_cuda::driver::{Context, Device, DeviceMemory, DriverError, Stream};
use strata_cuda::ops::{Columns, Logits, Products, Sorter, SorterRoom};
use strata_quant::{Activations, Format, Isa, Matrix, Out, dequantise, matmul};

use crate::{CheckError, Found, Random};

/// Quantised columns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantised {
    /// `[cols][k]`
    pub q: Vec<i8>,
    /// `[cols][k / 32]`
    pub d: Vec<f32>,
    /// `[cols][k / 16]`
    pub sums: Vec<i32>,
}

/// The largest values of rows, and their masses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LargestOf {
    ids: Vec<u32>,
    values: Vec<f32>,
    masses: Vec<u64>,
}

impl LargestOf {
    fn new(wanted: &Largest<'_>, largest: &[(u32, f32)], masses: &[u64]) -> LargestOf {
        let mut all = LargestOf::default();
        for ((row, largest), &mass) in wanted.rows.iter().zip(largest.chunks_exact(wanted.count)).zip(masses)
        {
            let first = largest[0].1;
            let largest = if first.is_nan() { &[(0, first)] } else { largest };
            all.ids.extend(largest.iter().map(|(id, _)| *id));
            all.values.extend(largest.iter().map(|(_, value)| *value));
            // One that is infinite is certain, and where the largest is chosen no mass is asked for.
            all.masses.push(if row.temperature > 0.0 && first.is_finite() { mass } else { 0 });
        }
        all
    }
}

/// What multiplies. `k` is the length of rows, inputs are `[cols][k]`, results `[cols][rows]`.
pub trait Multiplies {
    /// Quantises `cols` columns of `k` values.
    fn quantise(&mut self, x: &[f32], k: usize, cols: usize) -> Result<Quantised, CheckError>;
    /// The `n` values of one row.
    fn decode(&mut self, format: Format, row: &[u8], n: usize) -> Result<Vec<f32>, CheckError>;
    /// The products of a matrix, each times `scale`.
    fn product(
        &mut self,
        weights: (Format, &[u8], f32),
        x: &[f32],
        size: [usize; 3],
    ) -> Result<Vec<f32>, CheckError>;
    /// The largest of each row, `[rows][keep]` of `[rows][width]` values, and the rows' masses; see [`strata_backend::Backend::largest`]. Of a row with
    /// what isn't finite only that counts.
    fn largest(&mut self, values: &[f32], wanted: Largest<'_>) -> Result<LargestOf, CheckError>;
}

/// The CPU, with the instructions that are fastest here.
#[derive(Debug, Clone, Copy)]
pub struct OnCpu(pub Isa);

impl Multiplies for OnCpu {
    fn quantise(&mut self, x: &[f32], k: usize, cols: usize) -> Result<Quantised, CheckError> {
        let mut columns = Activations::new(k, cols);
        columns.quantise(self.0, x, k, cols);
        let mut all = Quantised::default();
        for col in 0..cols {
            all.q.extend(columns.q(col));
            all.d.extend(columns.d(col));
            all.sums.extend(columns.sums(col));
        }
        Ok(all)
    }

    fn decode(&mut self, format: Format, row: &[u8], n: usize) -> Result<Vec<f32>, CheckError> {
        let mut values = vec![0.0; n];
        dequantise(format, row, &mut values);
        Ok(values)
    }

    fn product(
        &mut self,
        (format, bytes, scale): (Format, &[u8], f32),
        x: &[f32],
        [rows, k, cols]: [usize; 3],
    ) -> Result<Vec<f32>, CheckError> {
        let mut columns = Activations::new(k, cols);
        columns.quantise(self.0, x, k, cols);
        let mut out = vec![0.0; rows * cols];
        let matrix = Matrix::new(format, bytes, k, rows).expect("rows are whole blocks").scaled(scale);
        let columns = strata_quant::Columns::Quantised(&columns);
        matmul(self.0, matrix, 0..rows, columns, Out::new(&mut out, rows));
        Ok(out)
    }

    fn largest(&mut self, values: &[f32], wanted: Largest<'_>) -> Result<LargestOf, CheckError> {
        let mut largest = vec![(0, 0.0); wanted.rows.len() * wanted.count];
        let mut masses = vec![0; wanted.rows.len()];
        wanted.find(values, &mut largest, &mut masses);
        Ok(LargestOf::new(&wanted, &largest, &masses))
    }
}

/// A GPU with its kernels for products.
pub struct OnGpu {
    context: Context,
    stream: Stream,
    products: Products,
    sorter: Sorter,
}

impl OnGpu {
    /// Takes the GPU into use.
    pub fn new(device: &Device) -> Result<OnGpu, CheckError> {
        let context = Context::new(device)?;
        let (products, sorter) = (Products::new(&context)?, Sorter::new(&context)?);
        Ok(OnGpu { stream: Stream::new(&context)?, products, sorter, context })
    }

    /// The first GPU.
    pub fn first() -> Result<OnGpu, CheckError> {
        OnGpu::new(&first()?)
    }

    fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<DeviceMemory, DriverError> {
        let memory = DeviceMemory::new(&self.context, size_of_val(values))?;
        self.stream.upload(values, memory.slice())?;
        Ok(memory)
    }

    fn download<T: bytemuck::Pod>(
        &self,
        from: strata_cuda::driver::DeviceSlice<T>,
    ) -> Result<Vec<T>, DriverError> {
        let mut values = vec![T::zeroed(); from.len()];
        self.stream.download(from, &mut values)?;
        Ok(values)
    }

    fn columns(&self, x: &[f32], k: usize, cols: usize) -> Result<(DeviceMemory, Columns), DriverError> {
        let memory = DeviceMemory::new(&self.context, Columns::bytes_for(k, cols))?;
        let columns = Columns::new(&memory, k, cols);
        let x = self.upload(x)?;
        self.products.quantise(&self.stream, x.slice(), &columns)?;
        self.stream.synchronize()?;
        Ok((memory, columns))
    }
}

/// The first GPU there is.
pub fn first() -> Result<Device, CheckError> {
    Ok(Device::all()?.swap_remove(0))
}

impl Multiplies for OnGpu {
    fn quantise(&mut self, x: &[f32], k: usize, cols: usize) -> Result<Quantised, CheckError> {
        let (_memory, columns) = self.columns(x, k, cols)?;
        let sums = self.download(columns.sums)?;
        let halves = |sum: u32| [i32::from(sum as i16), i32::from((sum >> 16) as i16)];
        Ok(Quantised {
            q: self.download(columns.q)?,
            d: self.download(columns.d)?,
            sums: sums.into_iter().flat_map(halves).collect(),
        })
    }

    fn decode(&mut self, format: Format, row: &[u8], n: usize) -> Result<Vec<f32>, CheckError> {
        let (row, out) = (self.upload(row)?, DeviceMemory::new(&self.context, 4 * n)?);
        self.products.decode(&self.stream, (format, row.slice()), out.slice())?;
        Ok(self.download(out.slice())?)
    }

    fn product(
        &mut self,
        (format, bytes, scale): (Format, &[u8], f32),
        x: &[f32],
        [rows, k, cols]: [usize; 3],
    ) -> Result<Vec<f32>, CheckError> {
        let (_memory, columns) = self.columns(x, k, cols)?;
        let (weights, scale) = (self.upload(bytes)?, self.upload(&[scale])?);
        let out = DeviceMemory::new(&self.context, 4 * rows * cols)?;
        self.stream.fill(out.slice::<u8>(), 0xff)?;
        // Some matrices don't fit in whole.
        let room = DeviceMemory::new(&self.context, DECODED)?;
        let weights = (format, weights.slice());
        self.products.product(
            &self.stream,
            weights,
            [rows, k, cols],
            &columns,
            Some(scale.slice()),
            out.slice(),
            room.slice(),
        )?;
        Ok(self.download(out.slice())?)
    }

    fn largest(&mut self, values: &[f32], wanted: Largest<'_>) -> Result<LargestOf, CheckError> {
        let Largest { rows, width, count } = wanted;
        let (values, mut items) = (self.upload(values)?, Vec::new());
        Logits::items(rows, width, &mut items);
        let items = self.upload(&items)?;
        let [one, two, three] = SorterRoom::sizes(width, rows.len(), count)
            .map(|len| DeviceMemory::new(&self.context, size_of::<u64>() * len));
        let room = [one?, two?, three?];
        let places = SorterRoom::new([0, 1, 2].map(|at| room[at].slice()));
        let logits = Logits { values: values.slice(), items: items.slice(), rows: rows.len(), width };
        let found = self.download(self.sorter.queue(&self.stream, &logits, count, true, places)?)?;
        let (mut largest, mut masses) = (vec![(0, 0.0); rows.len() * count], vec![0; rows.len()]);
        Sorter::read(&found, &mut largest, &mut masses);
        Ok(LargestOf::new(&wanted, &largest, &masses))
    }
}

/// The formats that products are made of on quantised columns.
pub fn block_formats() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| !format.is_float())
}

/// Quantisation, also of what is no number or too large.
pub fn quantisation(ours: &mut dyn Multiplies, theirs: &mut dyn Multiplies) -> Result<Found, CheckError> {
    let mut found = Found::default();
    for (k, cols) in [(2560, 7), (256, 1), (768, 65)] {
        let mut x = Random::new(k as u64).floats(k * cols);
        (x[5], x[40], x[100]) = (f32::NAN, f32::INFINITY, f32::MAX);
        let (ours, theirs) = (ours.quantise(&x, k, cols)?, theirs.quantise(&x, k, cols)?);
        let what = format!("{cols} columns of {k}");
        found.exactly(format_args!("{what}, values"), &ours.q, &theirs.q);
        found.floats(format_args!("{what}, scales"), &ours.d, &theirs.d);
        found.exactly(format_args!("{what}, sums"), &ours.sums, &theirs.sums);
    }
    Ok(found)
}

/// The largest logits, of rows up to a large vocabulary, with many that are equal, zeros of both signs, and some that aren't finite; as they are, and
/// with adjustments and masks; and their masses.
pub fn largest(ours: &mut dyn Multiplies, theirs: &mut dyn Multiplies) -> Result<Found, CheckError> {
    let mut found = Found::default();
    for [rows, width, count] in [
        [1, 1, 1],
        [3, 5, 4],
        [2, 2048, 128],
        [2, 2049, 1],
        [1, 12_288, 20],
        [2, 248_320, 1],
        [3, 248_320, 128],
    ] {
        let mut values = Random::new(width as u64).floats(rows * width);
        for (i, value) in values.iter_mut().enumerate() {
            // Steps of eighths tie.
            *value = if i % 3 > 0 { (*value * 8.0).round() / 8.0 } else { *value };
            if [2049, 12_288].contains(&width) {
                // Zeros of either sign are the largest.
                *value = if *value == 0.0 && i % 2 == 1 { 0.0 } else { -value.abs() };
            }
        }
        if rows == 3 {
            let broken = [f32::NAN, f32::NEG_INFINITY][usize::from(width > 5)];
            values[width + width / 2] = broken;
        }
        let adjustments: Vec<Vec<Adjustment>> =
            (0..rows).map(|row| adjustments(&values[row * width..][..width], row)).collect();
        let mask: Vec<u32> =
            Random::new(3).blocks(width.div_ceil(32) * 4).chunks_exact(4).map(word).collect();
        for (temperature, adjusted, masked) in [
            (0.0, false, false),
            (0.7, false, false),
            (0.0, true, false),
            (0.7, true, false),
            (1.5, true, true),
            (0.0, false, true),
        ] {
            let rows = adjustments.iter().enumerate().map(|(at, of)| LogitRow {
                adjustments: if adjusted { of } else { &[] },
                mask: masked.then_some(&mask[..]),
                // The rows' ways differ.
                temperature: if at == 2 { 0.0 } else { temperature },
            });
            let rows: Vec<LogitRow<'_>> = rows.collect();
            let wanted = Largest { rows: &rows, width, count };
            let (ours, theirs) = (ours.largest(&values, wanted)?, theirs.largest(&values, wanted)?);
            let what = format!(
                "the largest {count} of {} rows of {width}, temperature {temperature}, adjusted {adjusted}, masked {masked}",
                rows.len()
            );
            found.exactly(&what, &ours.ids, &theirs.ids);
            found.floats(&what, &ours.values, &theirs.values);
            found.exactly(format_args!("{what}, masses"), &ours.masses, &theirs.masses);
        }
    }
    Ok(found)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

/// Adjustments of some tokens, in no order: the largest, which fall; others, which rise to the top or tie; some that rule a token out.
fn adjustments(values: &[f32], row: usize) -> Vec<Adjustment> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]).then(a.cmp(&b)));
    let count = (3001 + row).min(values.len());
    let last = order.len() - 1;
    (0..count)
        .map(|i| {
            // From both ends.
            let token = if i % 2 == 0 { order[i / 2] } else { order[last - i / 2] };
            let none = Adjustment::none(token);
            match i % 5 {
                0 => Adjustment { repetition: 1.3, minus: 0.25 * (i % 4) as f32, ..none },
                1 => Adjustment { plus: 2.5, ..none },
                2 => Adjustment { repetition: 1.1, minus: -0.5, plus: 0.125, ..none },
                3 => none,
                _ => Adjustment { plus: f32::NEG_INFINITY, ..none },
            }
        })
        .collect()
}

/// Decoding arbitrary blocks.
pub fn decoding(
    format: Format,
    ours: &mut dyn Multiplies,
    theirs: &mut dyn Multiplies,
) -> Result<Found, CheckError> {
    let (mut found, n) = (Found::default(), 64 * 256);
    let row = Random::new(format as u64).blocks(bytes(format, n));
    found.floats(format, &ours.decode(format, &row, n)?, &theirs.decode(format, &row, n)?);
    Ok(found)
}

/// Products of arbitrary blocks with one column, with a few and with many, rows and columns no multiple of anything; then sums as large as
/// they get.
pub fn products(
    format: Format,
    ours: &mut dyn Multiplies,
    theirs: &mut dyn Multiplies,
) -> Result<Found, CheckError> {
    let mut found = Found::default();
    let mut compare = |weights: &[u8], x: &[f32], size: [usize; 3]| -> Result<(), CheckError> {
        let [rows, k, cols] = size;
        let weights = (format, weights, 0.7);
        let (ours, theirs) = (ours.product(weights, x, size)?, theirs.product(weights, x, size)?);
        found.floats(format_args!("{format}, {rows} rows of {k}, {cols} columns"), &ours, &theirs);
        Ok(())
    };
    for [rows, k, cols] in SIZES {
        // Rows of some formats can't be as long.
        let Some(bytes) = format.row_bytes(k) else { continue };
        let mut random = Random::new(format as u64 + 100);
        let weights = random.blocks(bytes * rows);
        compare(&weights, &random.floats(k * cols), [rows, k, cols])?;
    }
    for seed in 0..4 {
        let size @ [rows, k, cols] = [256, 2560, if seed < 2 { 100 } else { 260 }];
        let mut random = Random::new(format as u64 + 1000 * seed);
        let weights = random.extremes(bytes(format, k) * rows);
        compare(&weights, &random.ends(k, cols), size)?;
    }
    Ok(found)
}

/// Bytes of room for decoded rows.
const DECODED: usize = 2 << 20;

/// Rows, columns of weights, columns of activations.
const SIZES: [[usize; 3]; 31] = [
    [37, 256, 1],
    [64, 2560, 1],
    [700, 10240, 1],
    [5000, 96, 1],
    [19, 2560, 8],
    [45, 2560, 2],
    [16, 10240, 7],
    [321, 320, 9],
    [70, 160, 16],
    [650, 2560, 17],
    [100, 6144, 31],
    [47, 10240, 32],
    [2050, 256, 5],
    [65, 2560, 64],
    [9000, 512, 8],
    [33, 4864, 3],
    [1, 512, 9],
    [97, 256, 16],
    [8, 768, 21],
    [129, 2560, 33],
    [200, 6144, 48],
    [130, 736, 65],
    [128, 2560, 80],
    [64, 2304, 97],
    [257, 2048, 128],
    [131, 96, 129],
    [300, 4864, 150],
    [300, 4864, 260],
    [130, 4128, 300],
    [64, 10240, 257],
    // More tiles than a GPU has processors.
    [2100, 512, 1100],
];

fn bytes(format: Format, k: usize) -> usize {
    format.row_bytes(k).expect("multiples of 256 are whole blocks of every format")
}
