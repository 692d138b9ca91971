// The JDK's HttpClient with its defaults, which offers h2c: whole and streamed, on one connection.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

public class JdkClient {
  public static void main(String[] words) throws Exception {
    var client = HttpClient.newHttpClient();
    for (var stream : new boolean[] {false, true, false}) {
      var body = String.format(
          "{\"model\":\"%s\",\"prompt\":\"hi\",\"max_tokens\":4,\"stream\":%b}", words[2], stream);
      var request = HttpRequest.newBuilder(URI.create(words[0] + "/v1/completions"))
          .header("Authorization", "Bearer " + words[1])
          .header("Content-Type", "application/json")
          .POST(BodyPublishers.ofString(body))
          .build();
      var response = client.send(request, BodyHandlers.ofString());
      var isRight = response.statusCode() == 200
          && response.headers().firstValue("x-request-id").isPresent()
          && response.body().contains(stream ? "[DONE]" : "\"usage\"");
      if (!isRight) {
        throw new IllegalStateException(response.statusCode() + " " + response.body());
      }
    }
    System.out.println("JDK " + Runtime.version());
  }
}
