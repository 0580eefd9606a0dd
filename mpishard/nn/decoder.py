"""A decoder-only transformer of any architecture, on one rank or on a mesh."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpishard.arguments import integer
from mpishard.backend.array import check_module
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import PRODUCT, Ledger
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.block import TransformerBlock
from mpishard.nn.chunk import Chunk, LocalChunks
from mpishard.nn.generation import Generation, agreed_request, lengths_of_change, ranks_of_one_model
from mpishard.nn.inputs import Inputs
from mpishard.nn.layers import Layer
from mpishard.nn.options import ModelOptions, microbatches_on, settings_of_model
from mpishard.nn.products import Matmul, warn_if_slow, weights_stay
from mpishard.nn.units import Batch
from mpishard.nn.workspace import KeyValueCache
from mpishard.parameters.flat import FlatParameters
from mpishard.pipeline.runtime import Pipeline
from mpishard.pipeline.schedule import make_schedule
from mpishard.pipeline.schedule.generators import warn_if_bubbly

Array = Any


class TracedProducts:
    """Notes the products of bound layers, and of those inside of them, in a ledger while a trace is taken.

    Layers call a product that notes itself only in steps that are traced; a step that is not pays one comparison.
    Products of device arrays are not noted: they are computed after the call has returned.
    """

    def __init__(self, layers: Sequence[Layer], ledger: Ledger) -> None:
        self._layers = tuple(layers)
        self._ledger = ledger
        # By layer: the product that it was bound to; empty while none is noted.
        self._plain: dict[Layer, Matmul] = {}

    def follow_trace(self) -> None:
        """Note the products from now on if a trace is taken now, else not; for the beginning of a step."""
        if (self._ledger.spans is not None) == bool(self._plain):
            return
        if self._plain:
            for layer, matmul in self._plain.items():
                layer.matmul = matmul
            self._plain = {}
        else:
            for layer in self._layers:
                self._trace(layer)

    def _trace(self, layer: Layer) -> None:
        if layer.module is np and layer not in self._plain:
            self._plain[layer] = layer.matmul
            layer.matmul = _noted(layer.matmul, self._ledger)
        for child in layer.children:
            self._trace(child)


def _noted(matmul: Matmul, ledger: Ledger) -> Matmul:
    """The product, which notes its time and the extents of its operands."""

    @functools.wraps(matmul)
    def noted(a: Array, b: Array, out: Array) -> Array:
        began = time.perf_counter()
        product = matmul(a, b, out=out)
        ledger.note(f"{' x '.join(map(str, a.shape))} by {b.shape[-1]}", PRODUCT, began)
        return product

    return noted


class Decoder:
    """Embeddings, blocks and an output head, as an architecture builds them.

    `GPT` and `Llama` are such models; an architecture of your own makes another.  Initial values are keyed by `seed`
    and tensor names, so that they are the same on every mesh.

    On a mesh the methods are collective over the tensor and pipeline axes: all ranks of one data coordinate call them
    with the same arguments, and all of them get the same results.  With sharded parameters (ZeRO-3) they are collective
    over the data axis too: a rank without samples passes a batch of none, of shape (0, length).

    Parameters
    ----------
    architecture : DecoderArchitecture
        The sizes of the model, and its layers.
    mesh : Mesh, optional
        Default: one rank alone.
    seed : int
        Seed of the initial values, and of the masks of dropout.
    module : module
        ``numpy`` or ``cupy``: where parameters, activations and computed logits live.  Tokens may be of either.
    schedule : str
        The order in which pipeline stages work, one of `mpishard.pipeline.schedule.SCHEDULES`.
    chunks : int
        Model chunks of a pipeline rank, for the interleaved schedule.
    microbatches : int, optional
        Number of micro-batches into which a batch is cut along its first dimension; some may be empty.  Default: 1; on
        a pipeline 4 times the number of its ranks.  `losses_and_gradient` leaves this out: a training loop that calls
        it has cut the batch, in the same way on every mesh.
    stage_costs : "measured" or sequence of float, optional
        The times of the `Architecture.units` by which the model is cut into stages, given or measured on the mesh's
        first rank.  Default: blocks evenly.
    dtype : dtype
        float32 or float64: parameters, gradients and activations.
    compute_dtype : dtype, optional
        Multiply matrices in float16 or bfloat16, by name or as a dtype, with weights and activations in float32, see
        `mpishard.nn.products.make_matmul`.  Train in float16 with ``ShardingConfiguration(loss_scale="dynamic")``.
        It is fast for arrays of CuPy, attention included.  For those of NumPy it is fast in bfloat16 where a library
        multiplies it, see `mpishard.backend.gemm`, and products of attention stay in float32 then; otherwise it is
        slow, and a warning says so.
    storage_dtype : dtype, optional
        Keep activations between forward and backward in float16 or bfloat16.
    wire_dtype : dtype, optional
        Send activations and their gradients between stages in one of these.
    recompute : bool
        Activation checkpointing: keep only the input of each block, and compute the rest again in the backward pass.
    sequence_parallel : bool
        Megatron's sequence parallelism: between tensor-parallel layers, each tensor rank has the activations of its
        share of the tokens.
    sharded_parameters : bool
        Create the parameters divided (ZeRO-3), so that no rank ever has the whole model.

    Attributes
    ----------
    parameters : FlatParameters
        The tensors of this rank.
    architecture : DecoderArchitecture
    chunks : list of Chunk
        The chunks of this rank.
    blocks : list of TransformerBlock
        The blocks in these chunks.
    pipeline : Pipeline
    token_ids : dict
        Numbers of special tokens, by their names in the ``config.json`` that the model was imported from.

    Raises
    ------
    ValueError, TypeError
        On all ranks, before memory is taken, for sizes that do not fit each other, or a `module` that is none.
    RuntimeError
        On this rank, for CuPy without a GPU.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        module: Any = np,
        schedule: str = "1f1b",
        chunks: int = 1,
        microbatches: int | None = None,
        stage_costs: str | Sequence[float] | None = None,
        dtype: Any = np.float32,
        compute_dtype: Any = None,
        storage_dtype: Any = None,
        wire_dtype: Any = None,
        recompute: bool = False,
        sequence_parallel: bool = False,
        sharded_parameters: bool = False,
    ) -> None:
        call = f"{type(self).__name__}()"
        if not isinstance(architecture, DecoderArchitecture):
            raise TypeError(f"{call} needs an architecture, got {architecture!r}")
        if mesh is not None:
            checked_mesh(mesh)
        self.architecture: DecoderArchitecture = architecture
        options = ModelOptions(
            schedule=schedule,
            chunks=chunks,
            microbatches=microbatches,
            stage_costs=stage_costs,
            dtype=dtype,
            compute_dtype=compute_dtype,
            storage_dtype=storage_dtype,
            wire_dtype=wire_dtype,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            sharded_parameters=sharded_parameters,
        )
        seed = integer("seed", seed)
        check_module(module)
        if sharded_parameters and mesh is None:
            raise ValueError("sharded_parameters needs a mesh, over whose data axis to share them; pass mesh=")
        self.mesh = mesh
        self.token_ids: dict[str, Any] = {}
        axis = Axis.single("pipeline") if mesh is None else mesh.pipeline
        self.microbatches: int = microbatches_on(axis.size, microbatches)
        plan = make_schedule(schedule, axis.size, self.microbatches, chunks)
        self.architecture.check(1 if mesh is None else mesh.tensor.size, axis.size * chunks)
        if mesh is None or mesh.world.rank == 0:
            warn_if_bubbly(plan)
            if options.compute_dtype is not None:
                warn_if_slow(options.compute_dtype, module)
        self._local = LocalChunks(self.architecture, mesh, options, seed, module)
        self.parameters: FlatParameters = self._local.parameters
        self.parameters.model_settings = settings_of_model(self.architecture, options, axis.size, seed)
        self.parameters.sums_by_mpi = self.architecture.shards == 1
        if wire_dtype is not None:
            self.parameters.layout_dependence = "wire_dtype, which rounds where stages meet"
        elif storage_dtype is not None and axis.size * chunks > 1:
            self.parameters.layout_dependence = "storage_dtype, which rounds what blocks hand on within a stage"
        self.chunks: list[Chunk] = self._local.chunks
        self.blocks: list[TransformerBlock] = self._local.blocks
        self.pipeline: Pipeline = Pipeline(axis, self.chunks, schedule, self.parameters, wire_dtype=options.wire_dtype)
        self._traced_products = TracedProducts([unit for chunk in self.chunks for unit in chunk.units], axis.ledger)
        self._inputs = Inputs(self.architecture, module, seed)
        # A scaled loss may overflow in half precision; optimizers check for that.
        half = compute_dtype is not None
        self._expected: dict[str, Any] = {"over": "ignore", "invalid": "ignore"} if half else {}

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens."""
        return self.architecture.vocabulary_size

    @property
    def dropout(self) -> float:
        """Rate of dropout in training."""
        return self.architecture.dropout

    @property
    def context_length(self) -> int:
        """Longest sequence."""
        return self.architecture.context_length

    @property
    def activation_bytes(self) -> int:
        """Bytes held for activations of all micro-batches in flight and for scratch.

        Memory grows to what the largest batch so far needed and is used again, so that this is the peak.
        """
        return self._local.activation_bytes + self._inputs.nbytes

    def loss_and_gradient(self, tokens: Array, targets: Array, samples: Array | None = None) -> float:
        """Summed loss of a batch; the gradient of that sum goes to ``parameters.gradient``.

        Parameters
        ----------
        tokens, targets : int array, (batch, length)
            Any batch size, also 0, ``1 <= length <= context_length``; `targets` holds the token that follows each of
            `tokens`.
        samples : int array, (batch,), optional
            With dropout: the number of each sequence in the data.  The masks follow from these and from
            ``parameters.step``, which a training loop sets.  `OptimizationProblem.for_model` gives them.

        Returns
        -------
        float
            Cross-entropy in nats, summed over all tokens.

        Raises
        ------
        TypeError, ValueError
            If tokens or targets are no integers, out of range, or of another shape, or a model with dropout gets no
            samples.
        """
        samples = self._samples_for_dropout(samples)
        self._traced_products.follow_trace()
        with np.errstate(**self._expected), self._rounded_weights():
            return self.pipeline.train(
                self._inputs.micro_batches(tokens, targets, self.microbatches, samples, self.parameters.step)
            )

    def losses_and_gradient(self, batches: Sequence[tuple[Array, ...]]) -> list[float]:
        """Like `loss_and_gradient` for several batches, each of which is one micro-batch of the pipeline.

        `microbatches` cuts none of them.

        Parameters
        ----------
        batches : sequence of (tokens, targets) or (tokens, targets, samples)
            At least one; the arguments of `loss_and_gradient` for each.

        Returns
        -------
        list of float
            The loss of each batch.

        Raises
        ------
        TypeError, ValueError
            As `loss_and_gradient`.
        """
        pairs = [(*each[:2], self._samples_for_dropout(each[2] if len(each) > 2 else None)) for each in batches]
        self._traced_products.follow_trace()
        with np.errstate(**self._expected), self._rounded_weights():
            return self.pipeline.train_each(self._inputs.each_batch(pairs, self.parameters.step))

    def _rounded_weights(self) -> AbstractContextManager[None]:
        """For a step, in which no weight changes, and weights that are not sharded stay where they are.

        Sharded ones (ZeRO-3) are gathered again for each micro-batch, in memory that other units use in between.
        """
        return weights_stay(self.parameters.flat if self.parameters.sharded is None else None)

    def loss(self, tokens: Array, targets: Array) -> float:
        """Summed loss of a batch, without gradients.

        Parameters
        ----------
        tokens, targets : int array, (batch, length)
            As for `loss_and_gradient`.

        Returns
        -------
        float
            Cross-entropy in nats, summed over all tokens.

        Raises
        ------
        TypeError, ValueError
            If tokens or targets are no integers, out of range, or of another shape.
        """
        with self._local.forward_only():
            return self.pipeline.evaluate(self._inputs.micro_batches(tokens, targets, self.microbatches))

    def losses(self, batches: Sequence[tuple[Array, Array]]) -> list[float]:
        """Like `loss` for several batches, each of which is one micro-batch of the pipeline.

        Parameters
        ----------
        batches : sequence of (tokens, targets)
            At least one; the arguments of `loss` for each.

        Returns
        -------
        list of float
            The loss of each batch.

        Raises
        ------
        TypeError, ValueError
            As `loss`.
        """
        with self._local.forward_only():
            return self.pipeline.evaluate_each(self._inputs.each_batch(batches))

    def logits(self, tokens: Array) -> Array:
        """Unnormalised log-probabilities of the next token.

        Parameters
        ----------
        tokens : int array, (batch, length)
            Any batch size, ``1 <= length <= context_length``.

        Returns
        -------
        array, (batch, length, vocabulary_size)
            New memory, of the dtype of the parameters.

        Raises
        ------
        TypeError, ValueError
            If tokens are no integers, out of range, or of another shape.
        """
        tokens_n = self._inputs.checked("tokens", tokens)
        with self._local.forward_only():
            logits_nv = self.pipeline.infer(Batch(tokens_n, None, np.shape(tokens)[1]))
        if logits_nv is None:
            logits_nv = self._local.scratch.module.empty((len(tokens_n), self.vocabulary_size), self.parameters.dtype)
        return self._from_last_stage(logits_nv, "logits").reshape(*np.shape(tokens), self.vocabulary_size)

    def generate(
        self,
        prompt_tokens: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
        count: int,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        cache: bool = True,
    ) -> Any:
        """Continue a prompt, or several of any lengths together, by sampled tokens.

        Parameters
        ----------
        prompt_tokens : sequence of int, or sequence of these, or array
            At least one token each; of texts longer than ``context_length`` only the last tokens count.
        count : int
            Tokens to add to each.
        temperature : float
            Divides the logits; 0 takes the most likely token.
        seed : int
            Same seed, same texts.  Each has separate random numbers; the first has those that it would have alone.
        top_k : int, optional
            Draw from this many most likely tokens only.
        top_p : float, optional
            Draw only from the fewest most likely tokens whose probabilities have at least this sum, after `top_k`.
        stop_tokens : sequence of int
            A text ends with the first of these that is drawn.
        cache : bool
            Keep the keys and values of earlier tokens, so that a pass for a new token is over this token alone.  They
            take memory on the ranks that compute them.  Without them logits are the same up to rounding.  Beyond
            ``context_length``, and with embeddings or attention of one's own, nothing can be kept.

        Returns
        -------
        int64 array, or list of these
            The prompt and its continuation; for several prompts one array each.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if a prompt is empty, tokens are no integers or out of range, another argument is, or ranks
            that hold parts of one model have different arguments.
        FloatingPointError
            On all ranks, if logits are NaN or infinite.
        """
        request = agreed_request(
            ranks_of_one_model(self.mesh, self.parameters),
            prompt_tokens,
            self.vocabulary_size,
            count=count,
            seed=seed,
            cache=cache,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_tokens=stop_tokens,
        )
        texts = Generation(request, self.context_length, lengths_of_change(self.architecture))
        found = texts.run(self._logits_of_last, self._share_tokens)
        return found if request.several else found[0]

    def _logits_of_last(self, tokens_bt: np.ndarray, cache: KeyValueCache | None) -> Array | None:
        """Logits after the last token of each sequence, on the ranks of the last stage."""
        tokens_n = self._inputs.checked("tokens", tokens_bt)
        with self._local.forward_only():
            return self.pipeline.infer(Batch(tokens_n, None, tokens_bt.shape[1], last_only=True, cache=cache))

    def _share_tokens(self, tokens: np.ndarray) -> None:
        """Broadcast tokens that the last stage has drawn, so that replicas that share parameters continue
        identically.
        """
        self._from_last_stage(tokens, "token")
        if self.parameters.sharded is not None:
            self.parameters.sharded.axis.broadcast(tokens, root=0, label="token")

    def _samples_for_dropout(self, samples: Array | None) -> Array | None:
        """The numbers of samples, if dropout needs them; ValueError if it does and they are missing."""
        if not self.dropout:
            return None
        if samples is None:
            raise ValueError(
                f"the masks of dropout={self.dropout:g} follow from the numbers of samples: give loss_and_gradient "
                "samples=, one number for each sequence, or train with OptimizationProblem.for_model"
            )
        return samples

    def _from_last_stage(self, array: Array, label: str) -> Array:
        """Broadcast an array of the last pipeline stage to all stages, in place."""
        if self.mesh is not None and self.mesh.pipeline.size > 1:
            self.mesh.pipeline.broadcast(array, root=self.mesh.pipeline.size - 1, label=label)
        return array
