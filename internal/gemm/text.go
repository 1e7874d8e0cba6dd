package gemm

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cublasltapi"
)

// This file has the texts of problems and algorithms in files of tuning results.

// typeNames has torch's names of types in TunableOp signatures.
var typeNames = map[cublasapi.DType]string{
	cublasapi.R32F: "float", cublasapi.R64F: "double", cublasapi.R16F: "Half", cublasapi.R16BF: "BFloat16",
	cublasapi.R8FE4M3: "Float8_e4m3fn", cublasapi.R8FE5M2: "Float8_e5m2",
}

// Op returns the name of the operation in files of results, such as GemmTunableOp_BFloat16_TN.
func (p *Problem) Op() string {
	ops := [2]byte{'N', 'T'}
	kind := "GemmTunableOp"
	switch {
	case p.Float8:
		kind = "ScaledGemmTunableOp"
	case p.Epilogue != cublasltapi.EpilogueDefault:
		kind = "GemmAndBiasTunableOp"
	case p.Batch > 1:
		kind = "GemmStridedBatchedTunableOp"
	}
	return fmt.Sprintf("%s_%s_%c%c", kind, typeNames[p.A.Type], ops[p.TransA&1], ops[p.TransB&1])
}

// numbers lists the fields of a problem for its text. The workspace is a validator of the file.
func (p *Problem) numbers() []*int64 {
	list := []*int64{&p.M, &p.N, &p.K, &p.Batch}
	for _, l := range []*Layout{&p.A, &p.B, &p.C, &p.D, &p.Aux, &p.Bias} {
		list = append(list, &l.LD, &l.Stride)
	}
	return list
}

// flags lists the conditions of a problem for its text.
func (p *Problem) flags() []*bool {
	return []*bool{&p.NoSplitK, &p.Separate, &p.DeviceScalars, &p.Float8, &p.RowScales, &p.FastAccum}
}

// Params returns the parameters of the problem in files of results. ParseProblem is the
// inverse.
func (p *Problem) Params() string {
	ops := [2]byte{'n', 't'}
	parts := []string{string([]byte{ops[p.TransA&1], ops[p.TransB&1]})}
	for _, v := range p.numbers() {
		parts = append(parts, strconv.FormatInt(*v, 10))
	}
	for _, l := range []Layout{p.A, p.B, p.C, p.D, p.Aux, p.Bias} {
		parts = append(parts, strconv.Itoa(int(l.Type)))
	}
	parts = append(parts, strconv.Itoa(int(p.Compute)), strconv.Itoa(int(p.Epilogue)), strconv.Itoa(int(p.Schemes)),
		strconv.Itoa(int(p.Carveout)), strconv.Itoa(int(p.Library)))
	for _, a := range p.align {
		parts = append(parts, strconv.Itoa(int(a)))
	}
	for _, f := range p.flags() {
		parts = append(parts, map[bool]string{false: "0", true: "1"}[*f])
	}
	return strings.Join(parts, "_")
}

// parseProblem reads the text of Params, for a workspace of the given size.
func parseProblem(text string, workspace int64) (*Problem, error) {
	p := &Problem{workspace: workspace}
	parts := strings.Split(text, "_")
	bad := fmt.Errorf("%q is not the text of a product", text)
	numbers, flags := p.numbers(), p.flags()
	const types, others = 6, 5
	if len(parts) != 1+len(numbers)+types+others+alignments+len(flags) || len(parts[0]) != 2 {
		return nil, bad
	}
	p.TransA, p.TransB = cublasapi.Op(strings.IndexByte("nt", parts[0][0])), cublasapi.Op(strings.IndexByte("nt", parts[0][1]))
	v := make([]int64, len(parts)-1)
	for i, s := range parts[1:] {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < -1 {
			return nil, bad
		}
		v[i] = n
	}
	next := func() (n int64) { n, v = v[0], v[1:]; return n }
	for _, at := range numbers {
		*at = next()
	}
	for _, l := range []*Layout{&p.A, &p.B, &p.C, &p.D, &p.Aux, &p.Bias} {
		l.Type = cublasapi.DType(next())
	}
	p.Compute, p.Epilogue, p.Schemes = cublasapi.ComputeType(next()), cublasltapi.Epilogue(next()), cublasltapi.ReductionScheme(next())
	p.Carveout, p.Library = int32(next()), Library(next())
	for i := range p.align {
		p.align[i] = uint8(next())
	}
	for _, f := range flags {
		*f = next() != 0
	}
	if p.Params() != text {
		return nil, bad
	}
	return p, nil
}

// A config lists the attributes of an algorithm in the order of its text.
type config struct {
	id                                         int32
	tile                                       uint32
	splitK                                     int32
	scheme, swizzling, customOption, stagesNum uint32
	inner, cluster                             uint16
}

// each calls fn with the address and size of every attribute but the number.
func (c *config) each(fn func(a cublasltapi.ConfigAttribute, v any) error) error {
	for _, x := range []struct {
		a cublasltapi.ConfigAttribute
		v any
	}{
		{cublasltapi.ConfigTileID, &c.tile}, {cublasltapi.ConfigSplitKNum, &c.splitK}, {cublasltapi.ConfigReductionScheme, &c.scheme},
		{cublasltapi.ConfigCTASwizzling, &c.swizzling}, {cublasltapi.ConfigCustomOption, &c.customOption}, {cublasltapi.ConfigStagesID, &c.stagesNum},
		{cublasltapi.ConfigInnerShapeID, &c.inner}, {cublasltapi.ConfigClusterShapeID, &c.cluster},
	} {
		if err := fn(x.a, x.v); err != nil {
			return err
		}
	}
	return nil
}

const solutionFormat = "Lt_%d_%d_%d_%d_%d_%d_%d_%d_%d"

// String returns the text of a solution, such as Lt_66_18_1_0_0_0_36_0_2.
func (c *config) String() string {
	return fmt.Sprintf(solutionFormat, c.id, c.tile, c.splitK, c.scheme, c.swizzling, c.customOption, c.stagesNum, c.inner, c.cluster)
}

// parseSolution reads the text of String.
func parseSolution(text string) (*config, error) {
	c := new(config)
	_, err := fmt.Sscanf(text, solutionFormat, &c.id, &c.tile, &c.splitK, &c.scheme, &c.swizzling, &c.customOption, &c.stagesNum, &c.inner, &c.cluster)
	if err != nil || c.String() != text {
		return nil, fmt.Errorf("%q is not the text of an algorithm", text)
	}
	return c, nil
}

// splitsAsAllowed reports whether the algorithm reduces the parts of a split k by an allowed
// scheme. cuBLASLt checks that only for its own suggestions.
func (c *config) splitsAsAllowed(allowed cublasltapi.ReductionScheme) bool {
	if c.splitK == 0 || c.splitK == 1 {
		return true
	}
	return allowed != 0 && cublasltapi.ReductionScheme(c.scheme)&^allowed == 0
}
