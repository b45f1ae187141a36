"""The options that the adapters know, by family.

A case may differ by an option that nobody here has heard of; such a case is not offered. Options
that only describe (`note`) are among the names, so that they excuse nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_OPTIONS"]

_NAMES = {
    "advantages": """
        algorithm batch_normalize clip_range ddof eps f_norm gamma group_size handle_zero_tail
        input_clamp kl_coef kl_type lam lam_value leave_one_out length_adaptive_alpha masking
        mean minus_baseline normalize_rewards output_clamp peer_options singleton std std_norm
        use_leave_one_out_baseline var_clamp variance_floor weights whiten whiten_ddof
        whiten_eps
    """,
    "kl_estimators": "input_clamp kl_type output_clamp",
    "reward_shaping": """
        buffer cap coef ddof factor high horizon init low max_len max_penalty
        max_value_correct max_value_wrong min_value_correct min_value_wrong n_steps ngram_size
        target threshold tol
    """,
    "policy_losses": """
        agg batch_normalize beta c_clip cispo_eps_clip_high cispo_eps_clip_low clip_eps_high
        clip_eps_low clip_max clip_min clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low
        delta disable_ppo_ratio dual_clip enable_vllm_is_correction entropy_coef eps_clip
        eps_clip_c eps_clip_high eps_clip_higher eps_clip_low epsilon_high epsilon_low
        global_batch_info high importance_sampling_level kl_coef kl_cov_ratio
        kl_input_clamp_value kl_output_clamp_value kl_type level loss loss_type low
        max_completion_length max_seq_len mode note num_items_in_batch peer_options
        policy_loss_type ppo_kl_coef ratio_clip_c ratio_clip_max ratio_clip_min ratio_level
        reduction reference_policy_kl_penalty reference_policy_kl_type rejection
        sapo_temperature_neg sapo_temperature_pos sequence_level_importance_ratios tau_neg
        tau_pos threshold token_level_loss truncated_importance_sampling_ratio
        truncated_importance_sampling_ratio_min truncated_importance_sampling_type use_cispo
        use_importance_sampling_correction use_on_policy_kl_approximation
        vllm_is_correction_type vllm_is_truncated_threshold
    """,
    "loss_aggregation": """
        agg batch_num_tokens count_empty dp_size global_batch_size loss_scale_factor
        max_seq_len micro_batch_size mode prompt_boundaries
    """,
    "value_entropy_logprobs": "agg cliprange_value count_empty delta half loss_type temperature",
    "math_verification": "intended_correct peers_disagree",
    "flops": "causal embedding_counted pass",
}

KNOWN_OPTIONS: Mapping[str, frozenset[str]] = {
    family: frozenset(names.split()) for family, names in _NAMES.items()
}
