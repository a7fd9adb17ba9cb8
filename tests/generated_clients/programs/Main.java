// Calls an operator, and another with groups of tensors, fills and takes a buffer, and tells an error by its code.
import gradserve.ApiClient;
import gradserve.ApiException;
import gradserve.JSON;
import gradserve.api.BuffersApi;
import gradserve.api.OperatorsApi;
import gradserve.model.FloatList;
import gradserve.model.FloatTensor;
import gradserve.model.FloatTensorAnswer;
import gradserve.model.Gradient;
import gradserve.model.GradientBody;
import gradserve.model.NewBuffer;
import gradserve.model.Problem;
import gradserve.model.Receipt;
import gradserve.model.ReluGradRequest;
import gradserve.model.SGDOptimizerV2Request;
import java.util.List;
import java.util.Map;

public class Main {
    static FloatTensor tensor(Number... values) {
        return new FloatTensor(new FloatList().data(List.of(values)));
    }

    static GradientBody gradient(Number... values) {
        return new GradientBody().gradient(new Gradient(tensor(values)));
    }

    static void show(String name, FloatTensorAnswer tensor) {
        StringBuilder line = new StringBuilder(name);
        for (Object value : (List<?>) tensor.getData()) {
            line.append(' ').append(((Number) value).intValue());
        }
        System.out.println(line);
    }

    static String fault(ApiException error) throws Exception {
        Problem problem = JSON.getDefault().getMapper().readValue(error.getResponseBody(), Problem.class);
        switch (problem.getCode()) {
            case SHAPE_MISMATCH:
                return problem.getCode() + " of " + problem.getTensor();
            case BUSY:
            case NOT_READY:
                return "try again";
            default:
                return problem.getDetail();
        }
    }

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(System.getenv("GRADSERVE_URL"));
        OperatorsApi operators = new OperatorsApi(client);
        BuffersApi buffers = new BuffersApi(client);
        String name = "java";

        ReluGradRequest request = new ReluGradRequest().dY(tensor(1, 2)).X(tensor(0.5, -1));
        var answer = operators.reluGrad(null, null, null, null, null, null, null, null, null, null, null, null, request);
        show("relu", (FloatTensorAnswer) answer.getdX().getActualInstance());

        SGDOptimizerV2Request step = new SGDOptimizerV2Request().lr(tensor(1));
        step.weights(Map.of("fc.bias", tensor(3))).gradients(Map.of("fc.bias", tensor(1)));
        var stepped = operators.sGDOptimizerV2(null, null, null, null, null, null, null, null, null, null, null, null, null, step);
        show("step", (FloatTensorAnswer) stepped.getUpdatedWeights().get("fc.bias").getActualInstance());

        buffers.createBuffer(name, new NewBuffer().shape(List.of(2L)), null, null, null);
        for (int attempt = 0; attempt < 2; attempt++) {
            Receipt receipt = add(buffers, name, gradient(1, 2), "java 0");
            if (receipt.getCount() != 1) throw new AssertionError("a retry counts twice");
        }
        add(buffers, name, gradient(3, 4), null);
        show("take", buffers.take(name, 2L, null, null, null, null, null, null, null, null, null).getValue());

        try {
            request.X(tensor(1));
            operators.reluGrad(null, null, null, null, null, null, null, null, null, null, null, null, request);
        } catch (ApiException error) {
            System.out.println("error " + fault(error));
        }
    }

    static Receipt add(BuffersApi buffers, String name, GradientBody body, String key) throws ApiException {
        return buffers.accumulate(name, body, null, null, null, null, null, null, null, null, key, null);
    }
}
