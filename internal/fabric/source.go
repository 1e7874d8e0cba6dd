package fabric

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed cuda
var folder embed.FS

// files are the parts of the source; each may use the previous ones.
var files = []string{
	"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "packet.cuh", "word.cuh", "move.cu",
	"element.cuh", "values.cuh", "reduce.cu", "cell.cu", "line.cu",
}

// foldFiles are the parts of the source of Fold.
var foldFiles = []string{"prelude.cuh", "element.cuh", "float8.cuh", "fold.cu"}

// normFiles are the parts of the source of norms.
var normFiles = []string{
	"prelude.cuh", "memory.cuh", "rank.cuh", "wait.cuh", "packet.cuh", "word.cuh", "element.cuh", "float8.cuh", "values.cuh", "norm.cu",
}

// source, foldSource and normSource are the complete sources for compilers. Their messages name the file
// and its line.
var source, foldSource, normSource = joined(files), joined(foldFiles), joined(normFiles)

func joined(files []string) string {
	var all strings.Builder
	for _, name := range files {
		text, _ := folder.ReadFile("cuda/" + name) // the directory is embedded, so reading cannot fail
		fmt.Fprintf(&all, "#line 1 %q\n%s", name, text)
	}
	return all.String()
}
