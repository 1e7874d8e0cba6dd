package env

import (
	"fmt"
	"strings"
)

// Document writes docs/ENVIRONMENT.md.
func Document() string {
	var b strings.Builder
	b.WriteString(`# Environment variables

<!-- Written by "make generate" from internal/env: change that. -->

What a program sets by a configuration or a flag goes before the environment.
NCCL's and CUDA's own variables (NCCL_*, CUDA_*) are theirs: Chorus passes them
through and sets none of them.

| variable | type | default | meaning |
| --- | --- | --- | --- |
`)
	for _, v := range All() {
		def := v.Default
		if def == "" {
			def = "unset"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", v.Name, v.Type, def, v.Meaning)
	}
	return b.String()
}
