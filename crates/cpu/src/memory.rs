//! What the backend allocates, as regions of the plan.
//!
//! Owns the list and the sizes that depend on several ops at once: the workers' scratch and the memory of a window's piece
//! are each as large as the hungriest op's. How much an op takes is said in its file.

use strata_backend::{Shape, Spec, WeightData};
use strata_plan::{Category, Place, Plan, Region};
use strata_quant::Activations;

use crate::bench::{SLACK, TILE};
use crate::spans::Piece;
use crate::state::LayerRegions;
use crate::{buffers, draft, experts, gdn, head, mixer, ngram, qsa, route, weights};

/// Rows that an op with state takes at once, at least (unless windows are shorter).
const PIECE: usize = 256;

/// Where everything lies that the backend will allocate.
pub struct Described {
    pub(crate) sizes: Sizes,
    pub(crate) layers: Vec<LayerRegions>,
    pub(crate) buffers: Vec<Region>,
    pub(crate) weights: Region,
    pub(crate) rope: Region,
    pub(crate) bench: Region,
    pub(crate) piece: Region,
    pub(crate) products: Region,
    pub(crate) routing: [Region; 7],
}

/// Sizes that follow from the spec and the number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Rows of a window's piece, at most.
    pub(crate) piece_rows: usize,
    /// Floats of a piece.
    pub(crate) piece_floats: usize,
    /// Places to work: one per thread, or per expert of a row and for the row itself if those are more.
    pub(crate) places: usize,
    /// Floats of a place.
    pub(crate) each: usize,
    /// The longest column that is quantised.
    pub(crate) k_max: usize,
}

impl Sizes {
    /// For a number of threads.
    pub(crate) fn new(spec: &Spec, threads: usize) -> Sizes {
        let Shape { hidden: d, streams, mixer_rank, ref gdn, ref qsa, moe, ref ngram, .. } = spec.shape;
        let piece_rows = PIECE.max(TILE * threads).min(spec.window.max(1));
        let mut piece = [0; 3];
        let mut each = vec![
            mixer::scratch(&spec.shape, TILE),
            head::scratch(&spec.shape, TILE),
            route::scratch(&moe, TILE),
            experts::unit_floats(&spec.shape, TILE),
            experts::combine_floats(&spec.shape, TILE),
            draft::scratch(&spec.shape, TILE),
        ];
        let mut columns = vec![d, 2 * d, streams * d, mixer_rank, moe.width, moe.shared_width];
        if let Some(g) = gdn {
            piece[0] = piece_rows * gdn::piece_floats(g);
            each.push(gdn::scratch(g, TILE, piece_rows));
            columns.push(g.value_width());
        }
        if let Some(n) = ngram {
            piece[1] = piece_rows * ngram::piece_floats(&spec.shape);
            each.push(ngram::scratch(&spec.shape, n, TILE));
            columns.push(n.heads * n.row);
        }
        if let Some(q) = qsa {
            for block in spec.layers.iter().filter_map(|layer| layer.qsa) {
                let row = qsa::row_floats(q, block, spec.context);
                piece[2] = piece[2].max(piece_rows * qsa::piece_floats(q) + row);
                each.push(qsa::scratch(q, block, spec.context));
            }
            columns.push(q.heads * q.head_dim);
        }
        let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(0);
        Sizes {
            piece_rows,
            piece_floats: most(&piece) + SLACK,
            places: threads.max(moe.used + 1),
            each: (most(&each) + SLACK).next_multiple_of(16),
            k_max: most(&columns).next_multiple_of(32),
        }
    }
}

/// Adds everything to the plan.
pub(crate) fn describe(spec: &Spec, weights: &[WeightData], threads: usize, plan: &mut Plan) -> Described {
    let sizes = Sizes::new(spec, threads);
    let (moe, window) = (&spec.shape.moe, spec.window);
    let floats = |n: usize| n.saturating_mul(size_of::<f32>());
    let layers = (0..spec.layers.len()).map(|i| LayerRegions::describe(spec, i, plan)).collect();
    let buffers = (0..spec.buffers.len())
        .map(|i| plan.heap(Category::Window, spec.buffers[i].name, buffers::bytes(spec, i)))
        .collect();
    let rope = spec.shape.qsa.as_ref().map_or(0, |q| strata_backend::rope::floats(q, spec.context));
    let pairs = window.saturating_mul(moe.used);
    let units = route::most_units(moe, window);
    plan.item(
        Category::Scratch,
        "cpu quantised columns",
        Place::Heap,
        (Activations::bytes_for(sizes.k_max, TILE) * sizes.places) as u64,
    );
    plan.item(Category::Scratch, "cpu spans", Place::Heap, Piece::bytes(spec.sequences) as u64);
    let mut routing =
        |name: &str, n: usize| plan.heap(Category::Window, format!("cpu routing {name}"), floats(n));
    let routing = [
        routing("experts", pairs),
        routing("shares", pairs),
        routing("places", pairs),
        routing("order", pairs),
        routing("ends", moe.experts),
        routing("units", units),
        routing("bounds", units + 1),
    ];
    Described {
        sizes,
        layers,
        buffers,
        weights: plan.heap(Category::Weights, "cpu vectors as f32", floats(weights::floats(spec, weights))),
        rope: plan.heap(Category::Scratch, "cpu rotary table", floats(rope)),
        bench: plan.heap(Category::Scratch, "cpu workers", floats(sizes.each * sizes.places)),
        piece: plan.heap(Category::Scratch, "cpu window piece", floats(sizes.piece_floats)),
        products: plan.heap(
            Category::Window,
            "cpu expert products",
            floats(pairs.saturating_mul(spec.shape.hidden)),
        ),
        routing,
    }
}
