"""Private attributes of torch's objects: every one that Penstock uses, and what it is for.

They are used where they are needed. Private names of torch's modules are in `torch_private`.
"""

from collections.abc import Mapping

__all__ = ["ATTRIBUTES"]

# Private attributes of torch's objects, by the class that has them.
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "Tensor": {
        "_version": "counts writes in place",
        "_base": "what a view is a view of, or None",
        "_is_view": "whether it is a view",
        "_backward_hooks": "hooks on its gradient, or None",
        "_post_accumulate_grad_hooks": "hooks that run after its gradient was added, or None",
    },
    "UntypedStorage": {"_cdata": "identifies the memory while it exists"},
    "Module": {
        "_parameters": "its own parameters, by name",
        "_buffers": "its own buffers, by name",
        "_modules": "its children, by name",
        "_non_persistent_buffers_set": "the buffers that no state_dict has",
        "_forward_hooks": "hooks after forward, by number",
        "_forward_hooks_with_kwargs": "the numbers of those that take keywords",
        "_forward_hooks_always_called": "the numbers of those that run after an error too",
        "_forward_pre_hooks": "hooks before forward, by number",
        "_forward_pre_hooks_with_kwargs": "the numbers of those that take keywords",
        "_backward_hooks": "hooks of its backward",
        "_backward_pre_hooks": "hooks before its backward",
        "_state_dict_pre_hooks": "hooks before state_dict, by number",
        "_apply": "replaces every tensor; what `to` is made of",
        "_call_impl": "hooks and forward",
        "_compiled_call_impl": "the same compiled by `module.compile()`, or None",
    },
    "OptimizedModule": {
        "_orig_mod": "the module that `torch.compile` was given",
        "_initialize": "makes it call the compiled code",
    },
    "CompileContext": {"_dynamic": "whether sizes may vary, as `torch.compile` was called"},
    "backend": {"_torchdynamo_orig_backend": "the backend that a compiler's function wraps"},
    "Function": {"_backward_cls": "the class of its backward nodes"},
    "disabled function": {
        "_torchdynamo_disable": "compiled code calls it and does not look into it"
    },
    "Node": {"_sequence_nr": "grows with each operation of a forward"},
    "NllLossBackward0": {
        "_saved_reduction": "0 for no reduction, 1 for a mean, 2 for a sum",
        "_saved_total_weight": "what the mean was divided by",
    },
    "MseLossBackward0": {
        "_saved_reduction": "0 for no reduction, 1 for a mean, 2 for a sum",
        "_saved_target": "the target of the loss",
    },
    "DivBackward0": {"_saved_other": "the divisor"},
    "MulBackward0": {
        "_saved_other": "the second factor, where the first has gradients",
        "_saved_self": "the first factor, where the second has gradients",
    },
    "MeanBackward0": {"_saved_self_sym_numel": "the number of elements of a mean"},
    "SelectBackward0": {
        "_saved_dim": "the dimension of which one index is taken",
        "_saved_self_sym_sizes": "the sizes of what it is taken from",
    },
    "UnbindBackward0": {
        "_saved_dim": "the dimension over which a loop goes",
        "_input_metadata": "one for each of its results",
    },
    "torch.ops": {"_c10d_functional": "functional collectives, and the wait for them"},
    "torch.ops.aten": {
        "_grouped_mm": "products of many pairs of matrices",
        "_to_copy": "a cast in a traced graph",
        "_unsafe_view": "a view of a new tensor in a traced graph",
    },
    "OpOverload": {"_schema": "arguments and writes", "_overloadname": "its name after the dot"},
    "DeviceMesh": {
        "_get_root_mesh": "the mesh that it was sliced from",
        "_layout": "the shape and the strides of its dimensions",
    },
    "DTensor": {"_local_tensor": "its part on this rank"},
    "mesh_layouts": {
        "_MeshLayout": "the layout of a mesh",
        "_FlatLayout": "the layout of one of its dimensions, since torch 2.13",
    },
    # What schedules and stages call of one another; users replace these in classes of their own.
    "pipelining stage": {
        "_prepare_forward_infra": "prepares for the first forwards",
        "_prepare_backward_infra": "prepares for the first backwards",
        "_create_grad_recv_info": "what gradients a stage receives",
        "_resolve_peer_global_rank": "the global rank that holds a stage",
        "_runtime_validate": "whether a stage checks every tensor",
    },
    "pipelining schedule": {
        "_maybe_compute_loss": "computes the loss of a microbatch on the last stage",
        "_maybe_get_loss": "returns that loss for the backward",
        "_n_microbatches": "the number of microbatches of a step",
    },
    "ProcessGroup": {"_get_backend": "its backend for a kind of device"},
    "Options": {"_timeout": "how long a backend waits"},
    "Backend": {
        "_start_coalescing": "begins a batch of messages",
        "_end_coalescing": "ends a batch of messages and starts it",
    },
    "GradScaler": {"_found_inf_per_device": "whether unscaling found a value that is not finite"},
    "replicate.state": {"_ddp": "the DDP module inside of a replicated one"},
    "FSDPModule": {"_get_fsdp_state": "what FSDP2 keeps for a module"},
    "FSDPState": {
        "_is_root": "whether it is the outermost, which ends a backward",
        "_root_post_backward_final_callback": "reduces gradients at the end of a backward",
        "_fsdp_param_group": "its parameters, before torch 2.12",
        "_fsdp_param_groups": "its parameters, since torch 2.12",
    },
    "FSDPParam": {"_unsharded_param": "the gathered parameter"},
}
