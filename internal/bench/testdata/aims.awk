# Says whether the rows hold an aim: those of names that match and of smallest to largest bytes,
# if the name tells bytes, whose column is a number.
$1 ~ names && $column ~ /^[0-9.]+$/ {
	bytes = match($1, /bytes=[0-9]+/) ? substr($1, RSTART + 6, RLENGTH - 6) + 0 : smallest
	if (bytes < smallest + 0 || bytes > largest + 0) next
	all = all " " $column
	count++
	if ($column > most + 0) over++
	if ($column + 0 > worst) { worst = $column + 0; where = $1 }
}
END {
	if (!count) printf "unmeasured %s: want at most %s\n", words, most
	else printf "%-10s %s: %d rows, %d over %s, median %.3f, worst %.3f (%s)\n", over ? "short" : "holds", words, count, over, most, median(all), worst, where
}
