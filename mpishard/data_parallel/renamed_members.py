"""Old names of members of an optimizer, for one release."""

# Members that have moved behind `state`.
RENAMED = {
    "run_state": "state.capture",
    "check_facts": "state.check",
    "restore": "state.restore",
    "rebuild_state": "state.rebuild",
    "prepare_save": "state.consolidate",
    "prepares_saves": "state.needs_consolidation",
    "resync": "state.resync",
    "abandon": "state.abandon",
    "tell_of_changes": "state.report_changes",
    "tell_of_state": "state.report_continuation",
    "synchronizes_next_step": "state.synchronizes_next_step",
    "agrees_in_update": "state.agrees_in_update",
    "interrupted": "state.interrupted",
    "state_bytes": "state.nbytes",
    "gradient_bytes": "state.gradient_bytes",
}
