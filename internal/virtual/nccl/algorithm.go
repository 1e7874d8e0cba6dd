package nccl

import (
	"fmt"
	"slices"
	"strings"
)

// algorithms has the names that a call may select, for each collective.
var algorithms = map[kind][]string{
	kindAllReduce: {"TREE_LL", "TREE_LL128", "TREE_SIMPLE", "RING_LL", "RING_LL128", "RING_SIMPLE",
		"COLLNET_DIRECT_SIMPLE", "COLLNET_CHAIN_SIMPLE", "NVLS_SIMPLE", "NVLSTREE_SIMPLE",
		"SYMK_AGxLL_R", "SYMK_AGxLLMC_R", "SYMK_RSxTmaLD_AGxTmaST", "SYMK_RSxLD_AGxST", "SYMK_RSxLDMC_AGxSTMC"},
	kindAllGather: {"RING_LL", "RING_LL128", "RING_SIMPLE", "COLLNET_DIRECT_SIMPLE", "NVLS_SIMPLE", "PAT_SIMPLE",
		"SYMK_LL", "SYMK_LLMC", "SYMK_TmaST", "SYMK_ST", "SYMK_TmaSTMC", "SYMK_STMC", "SYMK_RailRing_LsaSTMC"},
	kindReduceScatter: {"RING_LL", "RING_LL128", "RING_SIMPLE", "COLLNET_DIRECT_SIMPLE", "NVLS_SIMPLE", "PAT_SIMPLE",
		"SYMK_LL", "SYMK_TmaLD", "SYMK_LD", "SYMK_LDMC", "SYMK_RailA2A_LsaLD", "SYMK_RailA2A_LsaLDMC"},
	kindBroadcast: {"RING_LL", "RING_LL128", "RING_SIMPLE"},
	kindReduce:    {"RING_LL", "RING_LL128", "RING_SIMPLE"},
}

// everywhere reports whether an algorithm needs no particular hardware or memory. Other
// algorithms depend on multicast, on the network or on windows, so virtual devices lack them.
func everywhere(name string) bool {
	return strings.HasPrefix(name, "RING_") || strings.HasPrefix(name, "TREE_")
}

// checkSelection returns why no algorithm of a collective satisfies a selection, or "". A
// selection has alternatives (,) of conditions that must all be true (+): the beginning of a
// name, or ^ and the beginning of names that are excluded.
func checkSelection(k kind, selection string) string {
	if selection == "" {
		return ""
	}
	found := false
	for alternative := range strings.SplitSeq(selection, ",") {
		left := slices.Clone(algorithms[k])
		for condition := range strings.SplitSeq(alternative, "+") {
			prefix, exclude := strings.CutPrefix(strings.TrimSpace(condition), "^")
			if !knownPrefix(prefix) {
				return fmt.Sprintf("algSelection %q: %q is not an algorithm", selection, prefix)
			}
			left = slices.DeleteFunc(left, func(name string) bool { return begins(name, prefix) == exclude })
		}
		found = found || slices.ContainsFunc(left, everywhere)
	}
	if !found {
		return fmt.Sprintf("algSelection %q: no algorithm of %s that virtual devices have satisfies it", selection, kindNames[k])
	}
	return ""
}

func knownPrefix(prefix string) bool {
	for _, names := range algorithms {
		if prefix != "" && slices.ContainsFunc(names, func(name string) bool { return begins(name, prefix) }) {
			return true
		}
	}
	return false
}

// begins reports whether a name begins with a prefix in any case.
func begins(name, prefix string) bool {
	return len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix)
}
